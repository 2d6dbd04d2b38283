"""What a run is: one pydantic model, read from YAML, with dotted overrides and a JSON schema for editors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, PositiveInt, ValidationError, field_validator, model_validator

from subspan.errors import ConfigError
from subspan.tune.sections import (
    DATA_INITS,
    EDITING_INITS,
    ZEROTH,
    Adapter,
    Audit,
    Continual,
    Data,
    FisherOptions,
    Objective,
    Positive,
    Privacy,
    Safeguard,
    Section,
    Zeroth,
    known_init,
    nearest,
)


class Config(Section):
    """One fine-tuning run."""

    model: str = Field(description='"asset:..." name, local folder or hub name')
    task: Literal["classification", "causal-lm"] = "classification"
    continual: Continual | None = Field(None, description="several data sets in turn, in place of data")
    data: Data
    prompt: str = Field("{text}", description="causal-lm: the user's message; {text} is the row's text")
    system: str | None = Field(None, description="causal-lm: the system message (default: the chat template's own)")
    output: Path = Field(description="the run folder")
    adapter: Adapter | None = Field(Adapter(), description="null trains every weight of the model itself")
    merged: bool = Field(False, description="also write the base model with the adapter merged into its weights")
    init: Annotated[str, AfterValidator(known_init)] = "default"
    calibration_rows: PositiveInt = Field(32, description="training rows that a data-dependent init looks at")
    fisher: FisherOptions = FisherOptions()
    optimizer: Literal["adamw", "muon", "mezo", "lozo", "lozo+"] = "adamw"
    zeroth: Zeroth = Zeroth()
    objective: Objective | None = Field(None, description="null is cross-entropy")
    privacy: Privacy | None = None
    audit: Audit | None = Field(None, description="score the rows first, then drop or down-weight the riskiest")
    safeguard: Safeguard | None = Field(None, description="rows nobody has read, on a model that should stay aligned")
    lr: Positive = 2e-4
    head_lr: Positive | None = Field(None, description="learning rate of the new classification head (default: lr)")
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.05, description="share of the steps with rising rate (0 by default without gradients)"
    )
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    batch_size: PositiveInt = Field(16, description="rows a step (the expected number, under privacy)")
    accumulate: PositiveInt = Field(1, description="split each batch into this many forward passes")
    max_steps: PositiveInt = 200
    max_length: PositiveInt = Field(512, description="tokens per row; longer texts lose their end, never the answer")
    evaluate_every: PositiveInt | None = Field(50, description="steps between looks at the validation rows; null: none")
    checkpoint_every: PositiveInt = 50
    log_every: PositiveInt = 5
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    seed: Annotated[int, Field(ge=0)] = 0
    report_to: list[Literal["tensorboard", "mlflow", "wandb"]] = Field([])

    @field_validator("privacy", "objective", mode="before")
    @classmethod
    def _one_word(cls, value: Any, info: Any) -> Any:
        """``privacy: prism`` is short for ``privacy: {method: prism}``, ``objective: zero-one`` for its ``loss``."""
        return {_SHORT[info.field_name]: value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _first_task_is_the_data(cls, values: Any) -> Any:
        """Under ``continual`` the first task stands in ``data``, by which one run's rows are known everywhere else."""
        stream = values.get("continual") if isinstance(values, dict) else None
        tasks = stream.get("tasks") if isinstance(stream, dict) else None
        if not (isinstance(tasks, list) and tasks and isinstance(tasks[0], dict)):
            return values
        if "data" in values:
            raise ValueError("continual.tasks say where the rows come from; leave out data")
        return values | {"data": {"source": "", **{k: v for k, v in tasks[0].items() if k in Data.model_fields}}}

    @model_validator(mode="after")
    def _sensible(self) -> "Config":
        if self.task == "causal-lm" and "{text}" not in self.prompt:
            raise ValueError("prompt must contain {text}, the place where each row's text goes")
        if self.task == "classification" and (self.prompt != "{text}" or self.system is not None):
            raise ValueError("a classifier reads the text alone: leave out prompt and system, or use task: causal-lm")
        if self.head_lr is not None and self.task != "classification":
            raise ValueError(f"head_lr={self.head_lr}: task {self.task} trains no head of its own")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} does not divide batch_size={self.batch_size}")
        if self.merged and self.adapter is None:
            raise ValueError("merged folds an adapter into the model, and adapter: null leaves the model whole anyway")
        private = self.privacy
        if self.objective is not None:
            self._trains_an_objective(self.objective.loss)
        if self.audit is not None:
            self._is_audited()
        if self.safeguard is not None:
            self._stays_aligned(self.safeguard)
        if self.continual is not None:
            self._learns_in_turn(self.continual)
        if self.optimizer in ZEROTH:
            if private is not None:
                raise ValueError(
                    f"optimizer: {self.optimizer} never sees the gradient of a row, which a private step has to clip; "
                    "use adamw or muon"
                )
            rank = self.zeroth.rank or 1
            if self.optimizer != "mezo" and self.adapter is not None and self.adapter.r <= 2 * rank:
                raise ValueError(
                    f"optimizer: {self.optimizer} with zeroth.rank {rank} needs an adapter.r above {2 * rank}, not "
                    f"{self.adapter.r}: in thinner factors there is no low-rank direction; lower zeroth.rank, raise "
                    "adapter.r, or use mezo"
                )
            if "warmup" not in self.model_fields_set:
                self.warmup = 0.0  # the first step would be one of rate 0, for which the weights are kept as a copy
        if self.adapter is None and (self.init != "default" or private is not None):
            what = f"init: {self.init}" if private is None else "privacy"
            raise ValueError(f"{what} works on the factors of an adapter, and adapter: null asks for none")
        if self.init in DATA_INITS and private is not None and not self.data.public:
            raise ValueError(
                f"init: {self.init} looks at the training rows without noise, which breaks the privacy guarantee; "
                "use another init, or set data.public: true if the rows are public"
            )
        if private is not None and private.method == "prism" and self.init != "default":
            raise ValueError(
                "privacy.method: prism brings its own start (spectral); leave init at default, or use method: naive"
            )
        if private is not None and private.method == "prism" and self.optimizer != "adamw":
            raise ValueError(
                "privacy.method: prism is an optimiser itself (adaptive, on the tangent space); "
                "leave optimizer at adamw, or use method: naive"
            )
        if private is not None and private.method == "ffa" and self.optimizer == "muon":
            raise ValueError("privacy.method: ffa freezes half of each factor pair and is defined for adamw only")
        if private is not None and self.max_grad_norm != 1.0:
            raise ValueError("under privacy each row's gradient is clipped, by privacy.clip; leave max_grad_norm out")
        if private is not None and self.accumulate > 1:
            raise ValueError("under privacy, batches are split by privacy.physical_batch; leave accumulate at 1")
        if private is not None and self.adapter is not None and self.adapter.dora:
            raise ValueError("dora has magnitudes outside the factor pairs, which the private step does not cover")
        return self

    def _learns_in_turn(self, stream: Continual) -> None:
        memory = stream.method == "moram"
        if self.adapter is None:
            raise ValueError("continual trains an adapter, and adapter: null asks for none")
        if self.privacy is not None:
            raise ValueError(
                f"privacy.method: {self.privacy.method} clips and noises LoRA's factor pairs, and a memory has none; "
                "leave out privacy, or train one data set with it"
                if memory
                else "privacy keeps one budget for one data set, and continual trains several in turn; leave out one"
            )
        if self.init != "default":
            raise ValueError(
                f"init: {self.init} starts one LoRA from one look at the base, and "
                + ("the atoms of a memory start empty" if memory else "a stream goes on from its last task")
                + "; leave init at default"
            )
        if self.objective is not None:
            raise ValueError(
                f"objective: {self.objective.loss} scores one set of labels, and each task of continual has its own; "
                "leave out objective or continual"
            )
        if memory and self.optimizer != "adamw":
            reason = (
                "never sees a gradient, and which atoms a token reads jumps as the weights are perturbed"
                if self.optimizer in ZEROTH
                else "moves all directions of a matrix equally far, and the atoms of a memory are vectors of their own"
            )
            raise ValueError(f"optimizer: {self.optimizer} {reason}; use adamw, or method: lora")
        if memory and self.merged:
            raise ValueError(
                "merged folds an adapter into the base weights, and a memory cannot be: what is read depends on the "
                "token; leave merged out, or use method: lora"
            )
        if self.safeguard is not None:
            raise ValueError("safeguard guards one training stage, and continual has several; leave out one")
        for option in ("dora", "rslora"):
            if memory and getattr(self.adapter, option):
                raise ValueError(f"adapter.{option} is a form of LoRA, and method: moram trains no LoRA; leave it out")
        for task in stream.tasks:
            if task.prompt is not None and self.task == "classification":
                raise ValueError(f"task {task.name!r}: a classifier reads the text alone: leave out prompt")
            if task.prompt is not None and "{text}" not in task.prompt:
                raise ValueError(f"task {task.name!r}: prompt must contain {{text}}, the place where a row's text goes")
        if memory and "alpha" not in self.adapter.model_fields_set:
            # a memory's atoms have scale 1 unless told otherwise
            self.adapter = self.adapter.model_copy(update={"alpha": float(self.adapter.r)})

    def _stays_aligned(self, wanted: Safeguard) -> None:
        if self.task != "causal-lm":
            raise ValueError(
                f"safeguard keeps what a model refuses, and task: {self.task} refuses nothing; use task: causal-lm"
            )
        if self.adapter is None:
            raise ValueError("safeguard merges adapters, and adapter: null asks for none")
        if self.adapter.dora:
            raise ValueError("safeguard merges s A Bᵀ, and dora has magnitudes besides; leave out adapter.dora")
        if self.init.startswith(EDITING_INITS) or (self.init == "fisher" and self.fisher.preserve == "residual"):
            raise ValueError(
                f"init: {self.init} writes the base weights, on which buffer and reinforce were trained; use init: "
                "default (or fisher with fisher.preserve: zero_b)"
            )
        if self.privacy is not None and self.privacy.method == "prism":
            raise ValueError(
                "privacy.method: prism starts by writing the base weights, on which buffer and reinforce were trained; "
                "use method: naive or ffa"
            )
        if self.privacy is not None and wanted.make is not None:
            raise ValueError(f"safeguard.make: {wanted.make} trains on the provider's own rows; leave out privacy")
        if wanted.keep is not None and (self.privacy is not None or self.optimizer in ZEROTH):
            which = f"optimizer: {self.optimizer}" if self.privacy is None else "privacy"
            raise ValueError(
                f"safeguard.keep adds rows to a step, and {which} makes its own of the batch; leave out keep"
            )

    def _is_audited(self) -> None:
        if self.task != "causal-lm":
            raise ValueError(f"audit scores answers by a row's gradient, and task: {self.task} has none; use causal-lm")
        if self.privacy is not None:
            raise ValueError(
                "audit looks at every row without noise, and what it drops depends on them: no privacy would be left; "
                "leave out audit or privacy"
            )
        if self.continual is not None:
            raise ValueError("audit scores the rows of one data set, and continual has several; leave out one")

    def _trains_an_objective(self, name: str) -> None:
        if self.task != "classification":
            raise ValueError(
                f"objective: {name} scores the logits of a row's labels, and task: {self.task} has none; "
                "use task: classification"
            )
        if self.privacy is not None:
            raise ValueError(
                f"objective: {name} replaces the loss whose gradient a private step clips row by row; "
                "leave out objective or privacy"
            )
        if self.optimizer in ZEROTH:
            raise ValueError(
                f"objective: {name} sends its estimate through a backward pass, and optimizer: {self.optimizer} makes "
                "none; use adamw or muon"
            )


def _explain(error: ValidationError) -> str:
    """The first problem pydantic found, as one sentence that names the key and the remedy."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        model: Any = Config
        for part in where[:-1]:
            model = model if part.isdigit() else _section(model.model_fields[part].annotation)
        prefix = ".".join(where[:-1])
        return nearest(where[-1], list(model.model_fields), f"key in {prefix}:" if prefix else "key")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{'.'.join(where)} is missing from the configuration"
    got = "" if repr(first["input"]) in message else f" (got {first['input']!r})"
    return f"{'.'.join(where)}: {message}{got}" if where else message


def _section(annotation: Any) -> Any:
    """The Section inside an annotation such as ``Privacy | None``."""
    if isinstance(annotation, type):
        return annotation
    return next(a for a in annotation.__args__ if a is not type(None))


def parse(values: dict[str, Any]) -> Config:
    """Validate a nested mapping; raises ``ConfigError`` with one sentence."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply ``key=value`` overrides (dotted keys; values are YAML).

    Raises ``ConfigError`` for a missing or malformed file, an unknown key or a combination that cannot work.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path} is a folder" if path.is_dir() else f"there is no configuration file {path}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys and values, not a {type(values).__name__}")
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"--set takes key=value, got {item!r}")
        _assign(values, key.strip().split("."), _value(key.strip(), text), key)
    return parse(values)


def _value(key: str, text: str) -> Any:
    """An override's value: YAML, or the text as it is where the key holds text (a prompt may begin with a brace)."""
    model: Any = Config
    field = None
    for part in key.split("."):
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        model = _section(field.annotation) if field else None
    if field is not None and field.annotation in (str, str | None) and text not in ("null", ""):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {key}: {text!r} is not valid YAML; quote it") from None


# Sections that may be written as one word, and the key that it stands for.
_SHORT = {"privacy": "method", "objective": "loss"}


def _assign(values: dict[str, Any], parts: list[str], value: Any, key: str) -> None:
    for part in parts[:-1]:
        inner = values.setdefault(part, {})
        if inner is None:
            inner = values[part] = {}
        if part in _SHORT and isinstance(inner, str):
            inner = values[part] = {_SHORT[part]: inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {key}: {part} is not a section")
        values = inner
    values[parts[-1]] = value


def dump(config: Config) -> str:
    """The resolved configuration as YAML, every default written out."""
    values = config.model_dump(mode="json", exclude={"data"} if config.continual else None)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
