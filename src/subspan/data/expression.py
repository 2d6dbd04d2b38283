"""Real gene expression with subtypes, from two Debian packages, read through the R that they bring along."""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from subspan.errors import MissingAsset


class Expression(NamedTuple):
    """Log expression (n samples, p genes), the genes' names, and what is known of each sample, by kind."""

    values: Float64[np.ndarray, "n p"]
    genes: list[str]
    subtypes: dict[str, list[str]]

    def most_variable(self, k: int) -> "Expression":
        """The k genes with the largest variance over all samples, in their order."""
        keep = np.sort(np.argsort(-self.values.var(0), kind="stable")[:k])
        return Expression(self.values[:, keep], [self.genes[i] for i in keep], self.subtypes)


def leukemia_all() -> Expression:
    """Acute lymphoblastic leukaemia: 128 patients, 12,625 probes (Chiaretti et al. 2004; Bioconductor's ``ALL``).

    Subtypes: ``lineage`` (B, 95 patients; T, 33) and ``molecular`` (NEG 74, BCR/ABL 37, ALL1/AF4 10, ...).

    Raises:
        MissingAsset: the Debian package r-bioc-all is not installed.
    """
    return _from_r(
        "library(ALL); data(ALL); x <- exprs(ALL); genes <- rownames(x);"
        "subtypes <- list(lineage=substr(ALL$BT, 1, 1), molecular=ALL$mol.biol)",
        "r-bioc-all",
    )


def golub() -> Expression:
    """Leukaemia: 38 patients, 3,051 genes (Golub et al. 1999, as pre-processed in Bioconductor's ``multtest``).

    Subtype: ``leukaemia`` (ALL, 27 patients; AML, 11).

    Raises:
        MissingAsset: the Debian package r-bioc-multtest is not installed.
    """
    return _from_r(
        'data(golub, package="multtest"); x <- golub; genes <- golub.gnames[, 3];'
        'subtypes <- list(leukaemia=ifelse(golub.cl == 0, "ALL", "AML"))',
        "r-bioc-multtest",
    )


def _from_r(code: str, package: str) -> Expression:
    """Run R code that sets x (genes by samples), genes and subtypes (a named list of vectors), and read them back."""
    missing = MissingAsset(f"this data comes with a Debian package that is not installed: apt install {package}")
    if shutil.which("Rscript") is None:
        raise missing
    with tempfile.TemporaryDirectory() as folder:
        write = (
            'writeBin(as.double(x), "x.bin"); writeLines(genes, "genes.txt");'
            'for (n in names(subtypes)) writeLines(as.character(subtypes[[n]]), paste0(n, ".subtype"))'
        )
        done = subprocess.run(
            ["Rscript", "--vanilla", "-e", f"suppressMessages({{{code}}}); {write}"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise missing from RuntimeError(done.stderr.strip()[-500:])
        place = Path(folder)
        genes = (place / "genes.txt").read_text("utf-8").splitlines()
        # R writes columns, which are samples, one after the other
        values = np.fromfile(place / "x.bin").reshape(-1, len(genes))
        return Expression(
            values, genes, {f.stem: f.read_text("utf-8").splitlines() for f in sorted(place.glob("*.subtype"))}
        )
