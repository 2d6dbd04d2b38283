"""The compiled decoder: exact with hardmax attention, and with softmax, rounded activations and rounded weights."""

import copy
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from subspan.errors import SubspanError
from subspan.files import replacing, write_json
from subspan.theory.turing.compiler import bit_length, build, embeddings, stages, unembeddings
from subspan.theory.turing.layers import Cache, Layer, fixed_linear
from subspan.theory.turing.machine import TuringMachine, Word
from subspan.theory.turing.numerics import (
    FORMATS,
    Arithmetic,
    Choice,
    Denoise,
    check_format,
    check_scale,
    paper_scale,
    required_scale,
    tie_limit,
)
from subspan.theory.turing.runs import Follower, Mistake, Run, Verification, WrongToken
from subspan.theory.turing.stepper import Stepper
from subspan.theory.turing.tokens import (
    ContextTooLong,
    Mode,
    Segment,
    Token,
    Vocabulary,
    even_bits,
    needed_bits,
    segments,
)

# A table of tokens beyond this is refused; 2e6 rows of 300 floats are 2.4 GB.
_MAX_VOCABULARY = 2_000_000
# Up to so many logits the table is faster than going field by field.
_FEW_LOGITS = 2**16
# Formats of activations and weights that a file can name.
_FILE_FORMATS = FORMATS | {"fp64": torch.float64}
# Steps after which a machine is said not to halt.
_MOST_STEPS = 1_000_000
# Tokens in one batch of contexts.
_BATCH_TOKENS = 2**14


class VocabularyTooLarge(SubspanError):
    """The table of all tokens would not fit memory."""


class CompiledTransformer(nn.Module):
    """A causal decoder that executes a Turing machine token by token; ``compile_machine`` makes it.

    ``softmax`` and ``sparse1`` give the same network under other attention and arithmetic, sharing its weights.
    """

    places: Tensor
    layers: Sequence[Layer]

    def __init__(self, machine: TuringMachine, bits: int, mode: Mode = "cot", factored_vocab: bool = False) -> None:
        super().__init__()
        self.machine, self.bits, self.factored_vocab = machine, bits, factored_vocab
        self.mode: Mode = mode
        self.how = Arithmetic()
        self.vocabulary = Vocabulary(machine, mode)
        if not factored_vocab and self.vocabulary.size > _MAX_VOCABULARY:
            raise VocabularyTooLarge(
                f"the vocabulary has {self.vocabulary.size:,} tokens, more than {_MAX_VOCABULARY:,}: "
                "pass factored_vocab=True, which keeps no table of them"
            )
        self.circuit = build(machine, bits, mode)
        self._into = embeddings(self.circuit, machine, self.vocabulary)
        self._outof = unembeddings(self.circuit, machine, self.vocabulary)
        self.embedding = self.unembedding = None
        if not factored_vocab:
            self.embedding = nn.Embedding.from_pretrained(self._into.dense())
            self.unembedding = fixed_linear(self._outof.dense())
        places = torch.arange(2**bits)[:, None] >> torch.arange(bits) & 1
        self.register_buffer("places", 2.0 * places - 1.0)
        layers = (Layer(i, self.circuit, i + 1) for i in range(self.circuit.depth))
        self.layers = nn.ModuleList(layers)  # pyright: ignore[reportAttributeAccessIssue]

    # ------------------------------------------------------------------------------------------------- other arithmetic

    def softmax(
        self,
        scale: float | str = "auto",
        dtype: torch.dtype | None = None,
        weight_dtype: torch.dtype | None = None,
        denoise: Denoise | None = "mlp",
        *,
        tie_guard: bool = True,
    ) -> "CompiledTransformer":
        """The softmax form: weights softmax(c S) rounded to ``weight_dtype``, activations to ``dtype``.

        Args:
            scale: c, or "auto" for ``required_scale`` at 2^bits tokens: a bound for fp32, bf16 and fp16, and what was
                enough in every run for the 8-bit formats.
            dtype: format of the activations; None is float32.
            weight_dtype: format of the attention weights; None is ``dtype``.
            denoise: "mlp" cleans the coordinates that heads wrote (8-bit formats: all coordinates) with six neurons
                each; "mlp-selective" and "mlp-full" force one of these; "snap" rounds to -1, 0 or 1; None does nothing.
            tie_guard: refuse contexts with more ties than ``weight_dtype`` carries. Without it they go wrong silently.

        Raises:
            ValueError: a scale that is not finite and positive, or an unknown ``denoise``.
            TypeError: formats that are not floating point.

        Warns when the scale is below the bound.
        """
        if denoise not in (None, *get_args(Denoise)):
            raise ValueError(f"denoise must be None or one of {', '.join(get_args(Denoise))}, got {denoise!r}")
        dtype = dtype or torch.float32
        weight_dtype = weight_dtype or dtype
        check_format("dtype", dtype)
        check_format("weight_dtype", weight_dtype)
        needed = None if denoise is None else required_scale(2**self.bits, 1.0, denoise, weight_dtype)
        if isinstance(scale, str):
            if scale != "auto" or needed is None:
                raise ValueError(
                    f"scale must be a number, or 'auto' with denoising; got {scale!r}, denoise={denoise!r}"
                )
            scale = needed
        check_scale(scale, needed)
        return self.arranged(Arithmetic("softmax", float(scale), dtype, weight_dtype, denoise, tie_guard=tie_guard))

    def sparse1(self, choice: Choice = "last") -> "CompiledTransformer":
        """The form whose rows each attend to one maximiser: weights of exactly 1, no limit on ties."""
        if choice not in ("first", "last", "random"):
            raise ValueError(f"choice must be 'first', 'last' or 'random', got {choice!r}")
        return self.arranged(Arithmetic("sparse1", choice=choice))

    def arranged(self, how: Arithmetic) -> "CompiledTransformer":
        """The same weights under another arithmetic, as it is given."""
        twin = copy.copy(self)
        twin.how = how
        return twin

    # ---------------------------------------------------------------------------------------------------------- forward

    def embed(self, ids: Int[Tensor, "b n"], first: int = 0) -> Float[Tensor, "b n d"]:
        """Token vectors with the position's bits in the first coordinates."""
        end = first + ids.shape[1]
        if end > 2**self.bits:
            raise ContextTooLong(
                f"a context of {end} tokens does not fit {self.bits} position bits: "
                f"compile with bits={even_bits(end)} or more"
            )
        x = self._table("_into", self.places).rows(ids) if self.embedding is None else self.embedding(ids)
        return torch.cat([self.places[first:end].expand(len(ids), -1, -1), x[..., self.bits :]], -1)

    def stream(self, ids: Int[Tensor, "b n"], cache: Cache | None = None) -> Float[Tensor, "b n d"]:
        """The residual stream after the last layer; with a cache, ``ids`` are the tokens that follow it."""
        x = self.embed(ids, 0 if cache is None else cache.length)
        for layer in self.layers:
            x = layer(x, self.how, cache)
        if cache is not None:
            cache.length += ids.shape[1]
        return x

    def states(self, ids: Int[Tensor, "b n"]) -> Iterator[Float[Tensor, "b n d"]]:
        """The residual stream before the first layer and after each."""
        x = self.embed(ids)
        yield x
        for layer in self.layers:
            x = layer(x, self.how)
            yield x

    def forward(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n v"]:
        """Logits of the next token. Words of different length are padded on the right with any token."""
        if self.unembedding is None:
            raise ValueError("a factored vocabulary has no table of logits: use predict")
        return self.unembedding(self.stream(ids))

    def predict(self, x: Float[Tensor, "n d"]) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
        """The best next token of final states, and the margin of its logit over the second best."""
        if self.unembedding is not None and len(x) * self.vocabulary.size < _FEW_LOGITS:
            top = self.unembedding(x).topk(2)
            return top.indices[:, 0], top.values[:, 0] - top.values[:, 1]
        return self._table("_outof", x).best(x)

    def _table(self, name: str, like: Tensor) -> Any:
        """A token table on the device and in the dtype of ``like``; it moves once, when the module has moved."""
        table = getattr(self, name)
        if table.base["inp"].device != like.device or table.base["inp"].dtype != like.dtype:
            table = table.to(like)
            setattr(self, name, table)
        return table

    def encode(self, contexts: Sequence[Sequence[Token]]) -> Int[Tensor, "b n"]:
        """Token ids of contexts, padded on the right with token 0, which nothing before it sees."""
        ids = torch.zeros(len(contexts), max(map(len, contexts)), dtype=torch.long)
        for row, tokens in zip(ids, contexts, strict=True):
            row[: len(tokens)] = self.vocabulary.encode_all(tokens)
        return ids.to(self.places.device)

    # ---------------------------------------------------------------------------------------------------------- running

    def run(self, word: Word, max_tokens: int = 4096) -> Run:
        """Let the model write by itself, at most ``max_tokens`` tokens (prompt included); then the run is not complete.

        Raises:
            MissingTransition: the tokens lead to a state and symbols that the table lacks (the simulator's error).
            ContextTooLong: a context outgrew the position bits.
            TieLimit: more ties than the attention weights carry.
        """
        run = self.run_batch([word], max_tokens)[0]
        if run.error is not None:
            raise run.error
        return run

    @torch.no_grad()
    def run_batch(self, words: Sequence[Word], max_tokens: int = 4096) -> list[Run]:
        """``run`` for several words at once; what ``run`` would raise is the ``error`` of the run that it ended."""
        followers = [Follower(self.machine, word, self._tie_limit()) for word in words]
        left = [max_tokens - len(f.tokens) for f in followers]
        while waiting := [i for i, f in enumerate(followers) if not (f.finished or f.error) and left[i] > 0]:
            used = self._write_context([followers[i] for i in waiting], [left[i] for i in waiting])
            for i, count in zip(waiting, used, strict=True):
                left[i] -= count
        return [
            Run(
                self,
                f.word,
                tuple(f.segments),
                f.steps,
                f.margin,
                "".join(f.output or ()) if f.finished else None,
                f.finished,
                f.error,
            )
            for f in followers
        ]

    def _write_context(self, followers: Sequence[Follower], budgets: Sequence[int]) -> list[int]:
        """Write one context for each follower in lockstep, rows still in their prompt being fed; tokens written."""
        prompts = self.encode([f.tokens for f in followers])
        lengths = [len(f.tokens) for f in followers]
        advance, position = self._advance(len(followers)), min(lengths)
        ids, open_rows = prompts[:, :position], set(range(len(followers)))
        used = [0] * len(followers)
        while True:
            try:
                best, margin = self.predict(advance(ids))
            except ContextTooLong as error:
                for i in open_rows:
                    followers[i].error = error
                return used
            predicted, margins = best.tolist(), margin.tolist()
            following = prompts[:, position].tolist() if position < prompts.shape[1] else [0] * len(followers)
            for i in sorted(open_rows):
                if position < lengths[i]:
                    continue
                following[i] = predicted[i]
                used[i] += 1
                if followers[i].feed(self.vocabulary.decode(predicted[i]), margins[i]) or used[i] >= budgets[i]:
                    open_rows.remove(i)
            if not open_rows:
                return used
            ids = torch.tensor(following, device=prompts.device)[:, None]
            position += 1

    def _advance(self, rows: int) -> Callable[[Tensor], Tensor]:
        """A function that takes the next tokens of ``rows`` contexts and gives their last final states."""
        if rows == 1 and self.places.device.type == "cpu" and self.places.dtype == torch.float32:
            stepper = Stepper(list(self.layers), self.how, 2**self.bits)
            return lambda ids: stepper.extend(self.embed(ids, stepper.length)[0])
        cache = Cache()
        return lambda ids: self.stream(ids, cache)[:, -1]

    def _tie_limit(self) -> int | None:
        how = self.how
        if how.weight_dtype is None or not how.tie_guard:
            return None
        return tie_limit(how.weight_dtype)

    @torch.no_grad()
    def verify(self, contexts: Sequence[Segment]) -> Verification:
        """Predict every claimed token of given contexts at once (each from the true ones before it) and compare.

        All right means that the model, writing by itself, writes exactly these contexts.
        """
        claimed, mistakes, margin = 0, [], float("inf")
        for start, batch in _batches(contexts):
            ids = self.encode([segment.tokens for segment in batch])
            x = self.stream(ids)
            mask = torch.zeros_like(ids, dtype=torch.bool)
            for row, segment in zip(mask, batch, strict=True):
                row[segment.prompt - 1 : len(segment.tokens) - 1] = True
            best, margins = self.predict(x[mask])
            rows, places = torch.nonzero(mask, as_tuple=True)
            expected = ids[rows, places + 1]
            claimed += len(best)
            margin = min(margin, margins.min().item() if len(margins) else margin)
            decode = self.vocabulary.decode
            mistakes += [
                Mistake(start + int(rows[i]), int(places[i]) + 1, decode(int(expected[i])), decode(int(best[i])))
                for i in torch.nonzero(best != expected)[:, 0].tolist()
            ]
        return Verification(claimed, tuple(mistakes), margin)

    def check(self, word: Word, max_steps: int = 1_000_000) -> Verification:
        """Compare every claimed token with the direct simulator's run.

        Raises:
            WrongToken: the model differs; the message holds the first difference.
            MissingTransition, ContextTooLong, TieLimit: as ``run``.
            UnprintableOutput: the machine's output holds a symbol outside its input alphabet.
        """
        contexts = segments(self.machine, word, self.bits, self.mode, max_steps)
        if (limit := self._tie_limit()) is not None:
            follower = Follower(self.machine, word, limit)
            for segment in contexts:
                for token in segment.tokens[segment.prompt :]:
                    follower.feed(token)
                    if follower.error is not None:
                        raise follower.error
        found = self.verify(contexts)
        if found.mistakes:
            first = found.mistakes[0]
            raise WrongToken(
                f"token {first.position} of context {first.segment} should be {str(first.expected)!r}, the model says "
                f"{str(first.got)!r} ({len(found.mistakes)} of {found.claimed} tokens differ)"
            )
        return found

    # ------------------------------------------------------------------------------------------------------------ sizes

    def size_report(self) -> list[dict[str, Any]]:
        """Sizes as built beside the theory's formulas (exact for r >= 4): rows of quantity, measured and formula."""
        c, r = self.circuit, self.bits
        heads = [head for layer in c.heads.values() for head in layer]
        mlps = [c.mlp(layer) for layer in range(1, c.depth + 1)]
        weights = [m for mlp in mlps for m in mlp if m.numel()]
        key_width = max(len(head.q) for head in heads)
        formula = size_formulas(self.machine, r, self.mode)
        measured = {
            "depth L": c.depth,
            "width d": c.width,
            "heads per layer H": max(map(len, c.heads.values())),
            "key width d_k": key_width,
            "value width d_v": max(len(head.v) for head in heads),
            "hidden width d_ff": max(map(len, c.neurons.values())),
            "vocabulary": self.vocabulary.size,
        }
        rows = [{"quantity": name, "measured": n, "formula": formula[name]} for name, n in measured.items()]
        more: dict[str, float | int | None] = {
            "context, at most": 2**r,
            "MLP parameters": sum(m.numel() for m in weights),
            "of these not zero": sum(int(m.count_nonzero()) for m in weights),
            "largest weight or bias": max(int(m.abs().max()) for m in weights),
            "head selections": sum(2 * len(head.q) + 2 * len(head.v) for head in heads),
        }
        if self.how.scale is not None:
            more |= {"scale c": self.how.scale, "c_p inside W_Q and W_K": paper_scale(self.how.scale, key_width)}
        return rows + [{"quantity": name, "measured": n, "formula": None} for name, n in more.items()]

    # ------------------------------------------------------------------------------------------------------------ files

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``model.safetensors`` and ``machine.json`` (machine, bits, arithmetic) for ``load_compiled``."""
        names = {dtype: name for name, dtype in _FILE_FORMATS.items()} | {None: None}
        how = asdict(self.how) | {key: names[getattr(self.how, key)] for key in ("dtype", "weight_dtype")}
        header = {"machine": self.machine.to_dict(), "bits": self.bits, "mode": self.mode}
        header |= {"factored_vocab": self.factored_vocab, "arithmetic": how}
        with replacing(Path(folder) / "model.safetensors") as part:
            save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, part)
        write_json(Path(folder) / "machine.json", header)


def load_compiled(folder: str | os.PathLike[str]) -> CompiledTransformer:
    """Read what ``CompiledTransformer.save`` wrote."""
    header = json.loads((Path(folder) / "machine.json").read_text("utf-8"))
    machine = TuringMachine.from_dict(header["machine"])
    model = CompiledTransformer(machine, header["bits"], header["mode"], header["factored_vocab"])
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    how = header["arithmetic"]
    return model.arranged(Arithmetic(**how | {key: _FILE_FORMATS.get(how[key]) for key in ("dtype", "weight_dtype")}))


def compile_machine(
    machine: TuringMachine,
    bits: int | None = None,
    mode: Mode = "cot",
    *,
    for_input: Word | None = None,
    factored_vocab: bool = False,
) -> CompiledTransformer:
    """Compile a machine into a decoder with hardmax attention that runs it.

    Args:
        machine: any deterministic machine.
        bits: r, the bits of a position (even; at least 2, with summaries 4). A context may hold 2^r tokens: the whole
            run with chain-of-thought, one segment with summaries. None takes the smallest that fits ``for_input``.
        mode: "cot" writes every step into one context; "scot" replaces it by a summary of the tapes now and then.
        for_input: the word that ``bits=None`` is for; the machine must halt on it.
        factored_vocab: keep no table of tokens (their number is 3^K |Q| |Gamma|^K and more): embed and predict field by
            field. The predictions are the same.

    Raises:
        ValueError: bits out of range, neither ``bits`` nor ``for_input``, or a machine that does not halt on it within
            a million steps.
        VocabularyTooLarge: more than two million tokens and not ``factored_vocab``.
    """
    if mode not in ("cot", "scot"):
        raise ValueError(f"mode must be 'cot' or 'scot', got {mode!r}")
    if bits is None:
        if for_input is None:
            raise ValueError("give bits, or for_input: the word whose run must fit")
        configuration = machine.start(for_input)
        steps = sum(1 for _ in itertools.islice(machine.steps(configuration), _MOST_STEPS))
        if configuration.state != machine.halting:
            raise ValueError(f"the machine does not halt on for_input within {steps:,} steps: give bits instead")
        bits = needed_bits(machine, for_input, mode)
    return CompiledTransformer(machine, bits, mode, factored_vocab)


def size_formulas(machine: TuringMachine, bits: int, mode: Mode) -> dict[str, int]:
    """The theory's sizes (3.4 and 3.5), for r >= 4; the hidden width counts the entries that the table has."""
    K, r = machine.tapes, bits
    q, g = bit_length(len(machine.states)), bit_length(len(machine.symbols))
    entries, Q, G = len(machine.transitions), len(machine.states), len(machine.symbols)
    vocabulary = 6 + len(machine.input_alphabet) + 3**K * Q * G**K + 2**K
    if mode == "cot":
        width = 6 * K * r + 6 * r + 3 * q + (3 * K + 1) * g + 10 * K + 21
        hidden = max(18 * r + 2, 14 * K * r + 2 * r, entries + 1)
    else:
        width = 7 * K * r + 9 * r + 5 * q + (4 * K + 1) * g + 13 * K + 31
        hidden = max(22 * r + 11, 18 * K * r + 2 * r + (r == 4), entries + 4 * K * g + 4 * K + 1)
        vocabulary += 2 + Q + (2 * G) ** K
    return {
        "depth L": stages(r).depth,
        "width d": width,
        "heads per layer H": 3 * K if mode == "cot" else 3 * K + 2,
        "key width d_k": 4 * r - 1,
        "value width d_v": max(r, q, g),
        "hidden width d_ff": hidden,
        "vocabulary": vocabulary,
    }


def _batches(contexts: Sequence[Segment]) -> Iterator[tuple[int, Sequence[Segment]]]:
    """Consecutive contexts whose padded tokens fit one batch, with the index of their first."""
    start = 0
    while start < len(contexts):
        stop, longest = start, 0
        while stop < len(contexts):
            longest = max(longest, len(contexts[stop].tokens))
            if stop > start and longest * (stop + 1 - start) > _BATCH_TOKENS:
                break
            stop += 1
        yield start, contexts[start:stop]
        start = stop
