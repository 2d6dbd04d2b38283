"""What can be chosen."""

from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

Construction = Literal["attention", "mlp", "init", "random", "reconstruct"]
Insert = Literal["all", "missing_only"]
Order = Literal["sequential", "parallel"]
Positions = Literal["none", "interpolate"]
QueryInit = Literal["normal", "bank"]
OnAllMissing = Literal["error", "prior"]
ProblemType = Literal["single_label_classification", "multi_label_classification"]


@dataclass(frozen=True)
class AOEPTConfig:
    """Options of :class:`AOEPTModel`; the defaults are the paper's where it has them.

    Args:
        prompt_len: L, prompt tokens per modality.
        depth: N, layers that get fresh prompts (0: no prompts).
        mcp: how the prompts are made of the bank. "attention" (3.3) is the paper's; "mlp" maps every prototype and
            pools them to L; "init" starts L free tokens from the pooled bank; "random" starts them from N(0, 0.02^2);
            "reconstruct" maps the visible features to L tokens and uses neither bank nor gate.
        num_heads: of the attention over the bank; must divide every width.
        reduction: bottleneck of gates and maps, width / reduction.
        alpha: weight of the consistency loss (3.7); 0 leaves it out.
        gate: the gate by the visible modality (3.5); False gives every sample the same prompts.
        gate_shared: one gate for all layers (None: yes for a single stream, no for towers, as released).
        insert: "missing_only" hides a modality's prompts from samples that have it.
        order: "sequential" gates each modality by what the one before it has just computed (as released); "parallel"
            by the inputs of the layer, which is symmetric.
        prompt_positions: "none" keeps the content's pretrained positions; "interpolate" stretches CLIP's text positions
            over prompts and text (as released), which shifts those of the text.
        shared_len: further tokens built for all modalities together (0; the released runs have as many as L).
        query_init: "normal", N(0, 0.02^2) (the paper's: all L prompts start almost equal); "bank", random prototypes
            minus their mean.
        kv_bottleneck: trainable low-rank maps of the bank before keys and values.
        on_all_missing: a sample without any modality is an error, or gets the "prior": blank inputs, ungated prompts.
        supcon_labels: samples of one class are no negatives of each other in the consistency loss.

    Raises:
        ValueError: an option out of range.
    """

    prompt_len: int = 16
    depth: int = 6
    mcp: Construction = "attention"
    num_heads: int = 8
    reduction: int = 16
    alpha: float = 0.05
    gate: bool = True
    gate_shared: bool | None = None
    insert: Insert = "all"
    order: Order = "sequential"
    prompt_positions: Positions = "none"
    shared_len: int = 0
    query_init: QueryInit = "normal"
    kv_bottleneck: bool = False
    on_all_missing: OnAllMissing = "error"
    supcon_labels: bool = False

    def __post_init__(self) -> None:
        for name, low in (("prompt_len", 0), ("depth", 0), ("num_heads", 1), ("reduction", 1), ("shared_len", 0)):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
            object.__setattr__(self, name, int(value))  # numpy's integers have no place in a json file
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(f"alpha must be finite and not negative, got {self.alpha}")
        for name, kinds in (
            ("mcp", Construction), ("insert", Insert), ("order", Order), ("prompt_positions", Positions),
            ("query_init", QueryInit), ("on_all_missing", OnAllMissing),
        ):  # fmt: skip
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kinds))}, got {getattr(self, name)!r}")
        if self.shared_len and self.mcp != "attention":
            raise ValueError(f"shared_len={self.shared_len} needs mcp='attention', got mcp={self.mcp!r}")
        if self.kv_bottleneck and self.mcp != "attention":
            raise ValueError(f"kv_bottleneck needs mcp='attention', got mcp={self.mcp!r}")

    @property
    def slots(self) -> int:
        """Prompt tokens in a sequence, [shared; own]; 0 when nothing is inserted."""
        return self.shared_len + self.prompt_len if self.depth else 0
