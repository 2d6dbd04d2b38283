"""The sections of a configuration, one class each, and the names they know."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]

# The initialisations that peft performs by itself; "default" is Kaiming A and zero B.
PEFT_INITS = ("default", "gaussian", "pissa", "olora", "orthogonal", "mica", "eva", "corda", "lora_ga")
# Those that look at training rows before the first step.
DATA_INITS = ("eva", "corda", "lora_ga", "fisher")
# peft's starts that write the base weight.
EDITING_INITS = ("pissa", "olora", "corda", "lora_ga")


def nearest(word: str, known: Sequence[str], what: str) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
    return f"unknown {what} {word!r}{hint}"


def known_init(name: str) -> str:
    if name in ("fisher", *PEFT_INITS) or name.startswith("pissa_niter_"):
        return name
    raise ValueError(nearest(name, ("fisher", *PEFT_INITS), "init"))


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class Data(Section):
    """Where the rows come from. ``source`` is an asset name, a csv/tsv/jsonl/json/parquet file, or a hub name."""

    source: str
    text: str | None = Field(None, description="column with the text (found by its usual names when left out)")
    label: str | None = Field(None, description="column with the label or the answer")
    group: str | None = Field(None, description="rows that share this column's value never part ways between splits")
    max_words: PositiveInt | None = Field(None, description="cut each text after this many words")
    validation: PositiveInt = Field(200, description="rows held out to watch training")
    test: PositiveInt = Field(400, description="rows held out for the figure that is reported")
    train: PositiveInt | None = Field(None, description="rows to train on (default: all that remain)")
    public: bool = Field(False, description="the rows are public: data-dependent starts may see them under privacy")


class Adapter(Section):
    """The LoRA adapter; see peft.LoraConfig for each field."""

    r: PositiveInt = 8
    alpha: Positive = 16
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: str | list[str] = "all-linear"
    dora: bool = False
    rslora: bool = False


class FisherOptions(Section):
    """Options of ``init: fisher``; see subspan.adapters.fisher_init."""

    mode: Literal["eigen", "score", "weighted", "projected", "gradient"] = "eigen"
    sign: Literal["gradient", "rotate", "fixed"] = "gradient"
    kappa: Positive = 0.3
    preserve: Literal["residual", "zero_b"] = "residual"

    @model_validator(mode="after")
    def _defined(self) -> "FisherOptions":
        if self.preserve == "zero_b" and self.mode != "eigen":
            raise ValueError(f"preserve: zero_b uses input directions only and needs mode: eigen, not {self.mode}")
        return self


ZEROTH = ("mezo", "lozo", "lozo+")


class Zeroth(Section):
    """Options of the optimisers that only evaluate the loss; see subspan.optim.LOZOPlus."""

    eps: Positive = 1e-3
    rank: PositiveInt | None = Field(
        default=None,
        description="lozo: 2, lozo+: at most 4; on an adapter below r / 2 (its default there: the largest such)",
    )
    interval: PositiveInt = 50
    candidates: PositiveInt = 16
    threshold: Annotated[float, Field(ge=0)] = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Objective(Section):
    """What to train on in place of cross-entropy, by noise on the logits; see subspan.optim.OutputSpaceLoss."""

    loss: str = Field(description="zero-one, truncated, or python:module.function of (logits, labels)")
    pairs: PositiveInt = Field(16, description="antithetic pairs of noisy logits scored for each row")
    sigma: Positive | Annotated[str, Field(pattern=r"^relative:\d")] = Field(
        1.0, description='scale of the noise on the logits, or "relative:a" of their running spread'
    )
    warmup: Annotated[float, Field(ge=0, lt=1)] = Field(0.05, description="share of the steps on cross-entropy first")
    cap: Positive = Field(2.0, description="truncated: cross-entropy in nats beyond which a row costs no more")

    @field_validator("loss")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in ("zero-one", "truncated") or name.startswith("python:"):
            return name
        raise ValueError(nearest(name, ("zero-one", "truncated", "python:module.function"), "objective"))


class Safeguard(Section):
    """Train on rows nobody has read without losing alignment, or make what that takes; see subspan.safety."""

    make: Literal["buffer", "reinforce"] | None = Field(
        None, description="provider: make this adapter out of data; null: a user's run"
    )
    buffer: Path | None = Field(None, description="folder of the buffer, which is on while the adapter trains")
    reinforce: Path | None = Field(None, description="folder of the adapter that is merged in after training")
    keep: str | None = Field(None, description="the provider's ordinary rows, a file or name as data.source")
    two_state: bool = Field(True, description="make: reinforce: every other step with the buffer off")
    alpha: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="share of reinforce that is removed along the user's output directions"
    )
    tau: Annotated[float, Field(ge=0, lt=1)] = Field(0.01, description="energy below which a direction does not count")
    weight: tuple[float, float] = Field((1.0, 0.5), description="weights of the user's adapter and of reinforce")
    subspace: Literal["svd", "gram"] = Field("svd", description="gram is the authors' code")
    missing: Literal["error", "keep", "drop"] = Field("error", description="layers that only reinforce adapts")

    @model_validator(mode="after")
    def _complete(self) -> "Safeguard":
        if self.make != "buffer" and self.buffer is None:
            what = "make: reinforce trains against a buffer" if self.make else "a user's run has the buffer on"
            raise ValueError(f"{what}: name its folder with buffer, or make one with make: buffer")
        if self.make is not None and self.reinforce is not None:
            raise ValueError(f"reinforce is merged into a user's adapter; make: {self.make} has none: leave it out")
        if self.make == "buffer" and self.buffer is not None:
            raise ValueError("make: buffer makes a buffer and needs none; leave out buffer")
        if self.make == "reinforce" and self.keep is None:
            raise ValueError(
                "make: reinforce without ordinary rows would refuse everything: name some with keep (data are the "
                "refusals)"
            )
        return self


class Audit(Section):
    """Scores of the training rows along a danger and a safety direction; see subspan.safety.SafetyRisk."""

    danger: str | None = Field(None, description="adapter folder, checkpoint or file of dangerous rows")
    safety: str | None = Field(None, description="the same, of safe rows, or of pairs (chosen, rejected)")
    init: str | None = Field(None, description="adapter at which gradients are taken (default: trained on 64 rows)")
    state: Literal["shared", "paper", "zero"] = "shared"
    drop_top: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="share of the rows, the riskiest, to drop")
    reweight: bool = Field(False, description="draw a row the less often the higher its score")

    @model_validator(mode="after")
    def _defined(self) -> "Audit":
        if missing := [name for name in ("danger", "safety") if getattr(self, name) is None]:
            raise ValueError(
                f"rows are scored along two directions, and {' and '.join(missing)} is not given; name an adapter "
                "folder, or a file of rows to train one on"
            )
        if bool(self.drop_top) == self.reweight:
            raise ValueError("say what the scores are for: drop_top: 0.02 or reweight: true, one of the two")
        if self.state == "zero" and self.init is not None:
            raise ValueError("state: zero takes gradients at the base model; leave out init")
        return self


class Privacy(Section):
    """Differential privacy at the level of one training row."""

    method: Literal["prism", "naive", "ffa"] = "prism"
    epsilon: Positive = 8.0
    delta: Share = 1e-5
    clip: Positive = 1.0
    accountant: Literal["prv", "rdp"] = "prv"
    physical_batch: PositiveInt = Field(64, description="rows per forward pass; memory only, no effect on the result")
    noise_seed: Annotated[int, Field(ge=0)] | None = Field(
        None, description="only to repeat a test: whoever knows this seed can subtract the noise"
    )
    twin: bool = Field(True, description="also train without privacy and report its accuracy beside")


class StreamTask(Data):
    """One task of ``continual:``: where its rows come from, as in ``data``, and what is its own."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$", description="what the tables call it (letters, digits, . _ -)")]
    prompt: str | None = Field(None, description="causal-lm: this task's message (default: the run's)")
    max_steps: PositiveInt | None = Field(None, description="this task's steps (default: the run's)")


class Continual(Section):
    """Data sets learned one after the other, in place of ``data``; see subspan.adapters.MoRAMConfig."""

    method: Literal["moram", "lora"] = Field("moram", description="a memory that grows, or one LoRA trained on and on")
    tasks: list[StreamTask]
    top_k: PositiveInt | None = Field(None, description="moram: atoms a token reads (default: adapter.r)")
    temperature: Positive = Field(0.05, description="moram: of the softmax over scores")
    threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2, description="moram: score below which an atom is silent"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Continual":
        names = [task.name for task in self.tasks]
        if len(names) < 2:
            raise ValueError(f"a stream has at least two tasks, this one has {len(names)}; for one use data")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two tasks are called {twice[0]!r}")
        given = self.model_fields_set & {"top_k", "temperature", "threshold"}
        defaults = {name: type(self).model_fields[name].default for name in given}
        if self.method == "lora" and (odd := sorted(n for n in given if getattr(self, n) != defaults[n])):
            raise ValueError(f"{odd[0]} says how a memory is read; leave it out, or use method: moram")
        return self
