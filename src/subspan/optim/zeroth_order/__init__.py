"""Training with forward passes only: MeZO, LOZO and LOZO+."""
