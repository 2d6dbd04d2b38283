"""FacRNN: a low-rank recurrent network under a VAE, with a penalty on the dependence between groups of its latents."""
