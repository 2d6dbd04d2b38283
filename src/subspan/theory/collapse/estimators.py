"""Leading eigenvalues and eigenvectors of a layer's Gauss-Newton matrix from outer products of class means.

A layer with weight W (p x q) has G = (1/n) sum over samples and logits of v vᵀ, v = vec(sum_t S_t X_tᵀ). Its leading
eigenvectors lie near the span of a few outer products D = a mᵀ; every function here works with the factors.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subspan.linalg import Eigh, leading_eigh, spectral_function
from subspan.theory.collapse.statistics import ClassMeans, LayerMeans

# Above these numbers of classes: Ritz directions are the leading ones of the means; only leading eigenvalues are
# computed; one direction per class is all that is kept.
COMPRESS, LEADING, CLASS_ONLY = 20, 64, 200


@dataclass(frozen=True)
class Directions:
    """The p x q matrices D_j = a[i_j] m[j_j]ᵀ."""

    a: Float[Tensor, "na p"]
    m: Float[Tensor, "nm q"]
    i: Int[Tensor, " d"]
    j: Int[Tensor, " d"]

    def __len__(self) -> int:
        return len(self.i)

    def gram(self) -> Float[Tensor, "d d"]:
        """<D_j, D_k> = <a_j, a_k> <m_j, m_k>."""
        return (self.a @ self.a.T)[self.i][:, self.i] * (self.m @ self.m.T)[self.j][:, self.j]

    def gram_product(self, v: Float[Tensor, "d b"]) -> Float[Tensor, "d b"]:
        """The Gram matrix times v, without forming it."""
        spread = self.a.new_zeros(len(self.m), self.a.shape[1], v.shape[1])
        spread = spread.index_add(0, self.j, self.a[self.i][:, :, None] * v[:, None])
        mixed = torch.einsum("mn,npb->mpb", self.m @ self.m.T, spread)
        return torch.einsum("dp,dpb->db", self.a[self.i], mixed[self.j])

    def inner(self, x: Float[Tensor, "p q"]) -> Float[Tensor, " d"]:
        """<D_j, x>."""
        return (self.a @ x @ self.m.T)[self.i, self.j]

    def overlaps(self, S: Float[Tensor, "k b t p"], X: Float[Tensor, "b t q"]) -> Float[Tensor, "k b d"]:
        """<D_j, sum_t S_t X_tᵀ> of every example and row, without forming a p x q matrix."""
        left, right = S @ self.a.T.to(S.dtype), X @ self.m.T.to(X.dtype)
        if S.shape[2] == 1:
            return left[:, :, 0, self.i].mul_(right[:, 0, self.j])
        return torch.einsum("kbta,btm->kbam", left, right)[..., self.i, self.j]

    def combine(self, c: Float[Tensor, " d"]) -> Float[Tensor, "p q"]:
        """sum_j c_j D_j."""
        left = self.a.new_zeros(len(self.m), self.a.shape[1]).index_add(0, self.j, c[:, None] * self.a[self.i])
        return left.T @ self.m


@dataclass(frozen=True)
class Products:
    """The p x q matrices themselves, for the means of products, which are no outer products."""

    stack: Float[Tensor, "d p q"]

    def __len__(self) -> int:
        return len(self.stack)

    def gram(self) -> Float[Tensor, "d d"]:
        rows = self.stack.flatten(1)
        return rows @ rows.T

    def inner(self, x: Float[Tensor, "p q"]) -> Float[Tensor, " d"]:
        return self.stack.flatten(1) @ x.flatten()

    def combine(self, c: Float[Tensor, " d"]) -> Float[Tensor, "p q"]:
        return torch.einsum("d,dpq->pq", c, self.stack)


def paired(A: Float[Tensor, "c k p"], mu: Float[Tensor, "c q"]) -> Directions:
    """D_(c,c') = A_c[c'] mu_cᵀ: at most K² of them."""
    c, k, _ = A.shape
    index = torch.arange(c * k, device=A.device)
    return Directions(A.flatten(0, 1), mu, index, index // k)


def outer(A: Float[Tensor, "c k p"], mu: Float[Tensor, "c q"]) -> Directions:
    """Every A_c[c'] with every mu_e: K³ of them."""
    c, k, _ = A.shape
    index = torch.arange(c * k * c, device=A.device)
    return Directions(A.flatten(0, 1), mu, index // c, index % c)


def class_vectors(A: Float[Tensor, "c k p"], mu: Float[Tensor, "c q"], R: Float[Tensor, "c k k"]) -> Directions:
    """K directions: the class's own row of R_c A_c, with mu_c."""
    c = torch.arange(len(A), device=A.device)
    return Directions((R @ A)[c, c], mu, c, c)


def predicted(means: ClassMeans, layer: LayerMeans) -> Directions:
    """The directions whose Gram matrix is the paper's prediction: sqrt(w_c) R_c^{1/2} A_c[c'] mu_cᵀ."""
    root = spectral_function(means.R, lambda values: values.clamp(min=0).sqrt())  # R is positive semidefinite
    A = means.share.sqrt()[:, None, None] * (root @ layer.A)
    if len(A) > CLASS_ONLY:
        c = torch.arange(len(A), device=A.device)
        return Directions(A[c, c], layer.mu, c, c)
    return paired(A, layer.mu)


def gram_spectrum(directions: Directions | Products, k: int | None = None) -> Eigh:
    """Eigenvalues of sum_j D_j D_jᵀ (vectorised), as many as there are directions or the leading k, and coefficients.

    Column j of ``vectors`` gives the unit eigenvector sum_q c_qj D_q; it is zero where the eigenvalue is.
    """
    if isinstance(directions, Directions) and k is not None and len(directions) > LEADING**2:
        values, vectors = leading_eigh(
            directions.gram_product, min(k, len(directions)), n=len(directions), like=directions.a,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
    else:
        values, vectors = torch.linalg.eigh(directions.gram())
        values, vectors = values.flip(0)[:k], vectors.flip(1)[:, :k]
    # eigenvalues below the rounding of the first are zeros
    floor = len(directions) * torch.finfo(values.dtype).eps * values[:1].clamp(min=0)
    values = torch.where(values > floor, values, torch.zeros_like(values))
    return Eigh(values, vectors * torch.where(values > 0, values, torch.inf).rsqrt())


@dataclass(frozen=True)
class Frame:
    """Orthonormal combinations sum_q T[q, r] D_q of directions."""

    directions: Directions
    T: Float[Tensor, "d r"]

    @classmethod
    def of(cls, directions: Directions, cut: float, gram: Tensor | None = None) -> "Frame":
        """A basis of the directions' span: those of the Gram matrix's eigenvectors above ``cut`` times the first.

        ``gram`` replaces the directions' own where these are one layer's part of longer vectors.
        """
        values, vectors = torch.linalg.eigh(directions.gram() if gram is None else gram)
        keep = values > cut * values[-1]
        return cls(directions, (vectors * values.clamp(min=0).rsqrt())[:, keep].flip(1))

    @classmethod
    def leading(cls, directions: Directions, k: int) -> "Frame":
        """The leading eigenvectors of the prediction."""
        values, vectors = gram_spectrum(directions, k)
        return cls(directions, vectors[:, values > 0])

    def rotate(self, overlaps: Float[Tensor, "k b d"]) -> Float[Tensor, "k b r"]:
        """From overlaps with the directions to coordinates in the frame."""
        return overlaps @ self.T.to(overlaps.dtype)

    def coordinates(self, x: Float[Tensor, "p q"]) -> Float[Tensor, " r"]:
        return self.T.T @ self.directions.inner(x)

    def project(self, x: Float[Tensor, "p q"]) -> Float[Tensor, "p q"]:
        """The part of x inside the span."""
        return self.directions.combine(self.T @ self.coordinates(x))


def ritz_frame(means: ClassMeans, layer: LayerMeans, basis: str, cut: float) -> Frame:
    """The directions on which G is projected, orthonormal; for many classes only those of leading prediction."""
    if basis == "class":
        return Frame.of(class_vectors(layer.A, layer.mu, means.R), cut)
    if basis == "outer":
        return Frame.of(outer(layer.A, layer.mu), cut)
    if len(layer.A) > COMPRESS:
        return Frame.leading(predicted(means, layer), 4 * len(layer.A))
    return Frame.of(paired(layer.A, layer.mu), cut)


def rayleigh(Z: Float[Tensor, "r r"], frame: Frame) -> Eigh:
    """Ritz values of the projection Z of G on the frame, descending, and coefficients of the vectors over D_q."""
    values, vectors = torch.linalg.eigh((Z + Z.T) / 2)
    return Eigh(values.flip(0).clamp(min=0), frame.T @ vectors.flip(1))  # G is positive semidefinite


def squares(rows: Float[Tensor, "k b r"]) -> Float[Tensor, "r r"]:
    """Sum of the outer squares of all rows."""
    flat = rows.flatten(0, 1)
    return flat.T @ flat


def class_products(
    S: Float[Tensor, "k b t p"], X: Float[Tensor, "b t q"], labels: Int[Tensor, " b"], classes: int
) -> Float[Tensor, "c k p q"]:
    """Sum over the examples of each class of sum_t S_t X_tᵀ."""
    out = S.new_zeros(classes, S.shape[0], S.shape[3], X.shape[2])
    for c in labels.unique().tolist():
        mine = labels == c
        out[c] = S[:, mine].flatten(1, 2).mT @ X[mine].flatten(0, 1)
    return out


def gauss_newton_product(
    S: Float[Tensor, "k b t p"], X: Float[Tensor, "b t q"], U: Float[Tensor, "r p q"]
) -> Float[Tensor, "r p q"]:
    """n G U for several p x q matrices: S_tᵀ (sum_s S_s U X_s) X_tᵀ, summed over examples and t."""
    moved = torch.einsum("btq,rpq->rbtp", X, U)
    logits = torch.einsum("kbtp,rbtp->rkb", S, moved)
    back = torch.einsum("kbtp,rkb->rbtp", S, logits)
    return torch.einsum("rbtp,btq->rpq", back, X)


def split(
    means: Float[Tensor, "c k p q"], share: Float[Tensor, " c"]
) -> tuple[Float[Tensor, "c p q"], Float[Tensor, "c k p q"]]:
    """Papyan's split of the part of G that class means v_cc' make: class and cross vectors, weights included.

    G_class = sum_c K w_c v_c v_cᵀ with v_c = mean over c' of v_cc', G_cross = sum_cc' w_c (v_cc' - v_c)(.)ᵀ; what is
    left of G is G_within. The three are its parts for every network under the squared loss (v1 of the paper, 4.2).
    """
    v, root = means.mean(1), share.sqrt()[:, None, None]
    return means.shape[1] ** 0.5 * root * v, root[..., None] * (means - v[:, None])
