"""What does theory predict for this network?"""

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
    "CompiledTransformer",
    "Configuration",
    "ContextTooLong",
    "Decoder",
    "MachineRun",
    "MissingTransition",
    "Mistake",
    "Run",
    "Scale",
    "Segment",
    "Step",
    "TieLimit",
    "Token",
    "TuringMachine",
    "UnprintableOutput",
    "Verification",
    "VocabularyTooLarge",
    "WrongToken",
    "binary_addition",
    "binary_counter",
    "compile_machine",
    "growth",
    "load_compiled",
    "measured_scale",
    "needed_bits",
    "paper_scale",
    "random_machine",
    "random_runs",
    "required_scale",
    "rewriter",
    "scanner",
    "segments",
    "tie_limit",
    "to_decoder",
]
