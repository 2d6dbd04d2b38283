"""What does theory predict for this network?"""

from subspan.theory.collapse.callback import CollapseSpectraCallback
from subspan.theory.collapse.metrics import CollapseMetrics
from subspan.theory.collapse.oracle import (
    LayerRows,
    MeasuredSpectrum,
    exact_layer_ggn,
    hessian_product,
    layer_rows,
    measured_spectra,
)
from subspan.theory.collapse.report import LayerSpectrum, SpectrumReport
from subspan.theory.collapse.spectra import collapse_spectra
from subspan.theory.collapse.statistics import Sums
from subspan.theory.collapse.ufm import (
    DeepUFM,
    UFMOptimum,
    alignment,
    linear_hessian,
    natural_basis,
    simplex_spectrum,
    train_ufm,
)
from subspan.theory.turing.decoder import Decoder, to_decoder
from subspan.theory.turing.machine import Configuration, MachineRun, MissingTransition, Step, TuringMachine
from subspan.theory.turing.machines import (
    binary_addition,
    binary_counter,
    random_machine,
    random_runs,
    rewriter,
    scanner,
)
from subspan.theory.turing.model import CompiledTransformer, VocabularyTooLarge, compile_machine, load_compiled
from subspan.theory.turing.numerics import TieLimit, paper_scale, required_scale, tie_limit
from subspan.theory.turing.runs import Mistake, Run, Verification, WrongToken
from subspan.theory.turing.scales import Scale, growth, measured_scale
from subspan.theory.turing.tokens import ContextTooLong, Segment, Token, UnprintableOutput, needed_bits, segments

__all__ = [
    "CollapseMetrics",
    "CollapseSpectraCallback",
    "CompiledTransformer",
    "Configuration",
    "ContextTooLong",
    "Decoder",
    "DeepUFM",
    "LayerRows",
    "LayerSpectrum",
    "MachineRun",
    "MeasuredSpectrum",
    "MissingTransition",
    "Mistake",
    "Run",
    "Scale",
    "Segment",
    "SpectrumReport",
    "Step",
    "Sums",
    "TieLimit",
    "Token",
    "TuringMachine",
    "UFMOptimum",
    "UnprintableOutput",
    "Verification",
    "VocabularyTooLarge",
    "WrongToken",
    "alignment",
    "binary_addition",
    "binary_counter",
    "collapse_spectra",
    "compile_machine",
    "exact_layer_ggn",
    "growth",
    "hessian_product",
    "layer_rows",
    "linear_hessian",
    "load_compiled",
    "measured_scale",
    "measured_spectra",
    "natural_basis",
    "needed_bits",
    "paper_scale",
    "random_machine",
    "random_runs",
    "required_scale",
    "rewriter",
    "scanner",
    "segments",
    "simplex_spectrum",
    "tie_limit",
    "to_decoder",
    "train_ufm",
]
