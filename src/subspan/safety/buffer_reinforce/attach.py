"""The buffer during a user's run: on while the user trains, never trained, and taken off without a trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from subspan.errors import SafetyError
from subspan.safety.buffer_reinforce.roles import adapter_digest, mark_role
from subspan.surgery import factor_pairs


class buffered:
    """Context of a user's run: both adapters active, only the user's trainable, the buffer's dropout off.

    Within it ``save_pretrained`` leaves the buffer out, merging into the base is refused, and every forward pass checks
    that the buffer is on and frozen. On leaving, the buffer is off and its bytes are those it had.

    Args:
        model: a peft model that holds both adapters.
        buffer: name of the provider's adapter.
        user: name of the adapter that trains.
        digest: what ``adapter_digest`` gave for the buffer when the run began, to resume it.

    Raises:
        SafetyError: the buffer is not the one of ``digest``, it was trained or changed, the model was merged while it
            was on, or another run left one attached.
        TargetError: there is no such adapter.
    """

    def __init__(self, model: Any, buffer: str = "buffer", user: str = "user", *, digest: str | None = None) -> None:
        self.model, self.buffer, self.user = model, buffer, user
        if buffer == user:
            raise ValueError(f"buffer and user are both {user!r}; the buffer is an adapter of its own")
        self.pairs = factor_pairs(model, buffer)
        factor_pairs(model, user)
        self.digest = adapter_digest(model, buffer)
        if digest is not None and digest != self.digest:
            raise SafetyError(
                f"the buffer's digest is {self.digest}, but the run began with {digest}: give the original buffer"
            )
        self.on = False
        self._dropouts: list[nn.Module] = []
        self._hook: Any = None
        self._merges: dict[str, Any] = {}

    def __enter__(self) -> "buffered":
        self.attach()
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def attach(self) -> None:
        """Put the buffer on; called again (after a trainer loaded a checkpoint) it restores what was changed."""
        if self._hook is None:
            if getattr(self.model, "subspan_buffered", None) is not None:
                raise SafetyError(
                    "a buffer is attached to this model already, perhaps by a run that was stopped; "
                    "model.subspan_buffered.remove() takes it off"
                )
            self.model.subspan_buffered = self
            mark_role(self.model, self.buffer, "buffer")
            for pair in self.pairs:  # train() would switch a dropout on again, and has nothing to switch so
                self._dropouts.append(pair.layer.lora_dropout[self.buffer])
                pair.layer.lora_dropout[self.buffer] = nn.Identity()
            for name in ("merge_adapter", "merge_and_unload"):
                self._merges[name] = getattr(self.model.base_model, name)
                setattr(self.model.base_model, name, self._refuse_merge)
            self._hook = self.model.register_forward_pre_hook(lambda module, args: self.check())
        if not any(p.requires_grad for p in self._parameters(self.user)):
            self.model.set_requires_grad(self.user, True)
        self.switch(True)
        self.check()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The buffer off: what the user's adapter does by itself (to score it, or to train on ordinary rows)."""
        self.switch(False)
        try:
            yield
        finally:
            if self._hook is not None:
                self.switch(True)

    def remove(self) -> None:
        """Take the buffer off; only the user's adapter stays active."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = self.model.subspan_buffered = None
        for pair, dropout in zip(self.pairs, self._dropouts, strict=True):
            pair.layer.lora_dropout[self.buffer] = dropout
        self._dropouts = []
        for name in self._merges:
            delattr(self.model.base_model, name)
        self._merges = {}
        self.switch(False)
        if adapter_digest(self.model, self.buffer) != self.digest:
            raise SafetyError(f"the buffer {self.buffer!r} changed while it was attached: discard this run")

    def check(self) -> None:
        """Raise ``SafetyError`` where the buffer would train, or is not as on as it should be."""
        for pair in self.pairs:
            for param in (pair.param_A, pair.param_B):
                if param.requires_grad or param.grad is not None:
                    raise SafetyError(
                        f"{pair.name}: the buffer {self.buffer!r} has become trainable (set_adapter does that); leave "
                        "the choice of adapters to buffered()"
                    )
            if (self.buffer in pair.layer.active_adapters) != self.on:
                state = "off" if self.on else "on"
                raise SafetyError(
                    f"{pair.name}: the buffer {self.buffer!r} was switched {state} from outside; leave the choice of "
                    "adapters to buffered(), and call its attach() after loading a checkpoint"
                )

    def switch(self, on: bool) -> None:
        """The buffer on or off beside the user's adapter; what trains stays as it is (peft would train both)."""
        own = set(self._parameters(self.buffer))
        trains = [(p, p.requires_grad and p not in own) for p in self.model.parameters()]
        names = [self.user, self.buffer] if on else [self.user]  # trainers take the first for the one that trains
        self.model.active_adapter = self.user
        self.model.base_model.set_adapter(names)
        for param, wanted in trains:
            param.requires_grad_(wanted)
        self.on = on

    def _parameters(self, adapter: str) -> list[nn.Parameter]:
        return [p for pair in factor_pairs(self.model, adapter) for p in (pair.param_A, pair.param_B)]

    def _refuse_merge(self, *args: Any, **options: Any) -> Any:
        raise SafetyError(
            f"the buffer {self.buffer!r} is attached and must not reach the base weights: remove it first"
        )
