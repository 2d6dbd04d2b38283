"""Find claims and run their sweeps: seeds, processes, progress, and a resume of what an interruption left."""

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import json
import math
import os
import pkgutil
import re
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

from subspan.claims.claim import Cell, Claim, Results, Row
from subspan.errors import ConfigError, MissingExtra, SubspanError
from subspan.files import write_text

RUNS = Path("runs/claims")


class TaskFailed(RuntimeError):
    """A cell of a sweep raised; the cause is chained. Finished tasks are kept."""


# --------------------------------------------------------------------------------------------------------- discovery


def claim_slugs() -> list[str]:
    """Slugs of all claims: the modules of this package whose file defines ``CLAIM``; none of them is imported."""
    folder = Path(__file__).parent
    return sorted(
        module.name
        for module in pkgutil.iter_modules([str(folder)])
        if not module.ispkg and re.search(r"^CLAIM\b", (folder / f"{module.name}.py").read_text("utf-8"), re.MULTILINE)
    )


def load_claim(slug: str) -> Claim:
    """Import one claim.

    Raises:
        ConfigError: no claim has this slug; the message names the nearest.
    """
    slugs = claim_slugs()
    if slug not in slugs:
        near = difflib.get_close_matches(slug, slugs, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"claims are: {', '.join(slugs)}"
        raise ConfigError(f"there is no claim {slug!r}; {hint}")
    return importlib.import_module(f"subspan.claims.{slug}").CLAIM


# ------------------------------------------------------------------------------------------------------- fingerprint


def claim_fingerprint(claim: Claim, smoke: bool = False) -> str:
    """``source_fingerprint`` of a claim as it stands."""
    return source_fingerprint({claim.cells.__module__, *(cell.run.__module__ for cell in claim.cells(smoke))})


def source_fingerprint(modules: Iterable[str]) -> str:
    """Hash of what a claim's numbers depend on: its modules, every subspan room they import, torch and numpy.

    Rooms are followed through their imports as whole folders, so a corrected method never reuses rows of the wrong one.
    """
    digest = hashlib.sha256()
    for package in ("torch", "numpy"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    seen: set[Path] = set()
    waiting = [file for module in modules for file in _source_files(module)]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += [file for name in _imported_names(path) for file in _source_files(name)]
    for path in sorted(seen):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _source_files(name: str) -> Iterator[Path]:
    """Files that a dotted name stands for: one module beside this file or anywhere outside, a whole room of subspan."""
    top, _, rest = name.partition(".")
    root = Path(__file__).parent.parent
    if top != "subspan":
        origin = getattr(sys.modules.get(name), "__file__", None)
        if origin:
            yield Path(origin)
    elif rest.startswith("claims."):
        path = root / "claims" / f"{rest.split('.')[1]}.py"
        # The harness is not a measurement: its own edits leave the rows valid.
        if path.is_file() and path.stem not in {"claim", "runner", "report"}:
            yield path
    elif rest and not rest.startswith("claims"):
        room = root / rest.split(".")[0]
        yield from room.rglob("*.py") if room.is_dir() else filter(Path.is_file, [room.with_suffix(".py")])


def _imported_names(path: Path) -> Iterator[str]:
    """Dotted names below subspan that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("subspan."))


# ------------------------------------------------------------------------------------------------------------- tasks


def _task_key(cell: Cell, seed: int) -> str:
    return json.dumps([cell.name, dict(cell.params), seed], sort_keys=True)


def _run_task(cell: Cell, seed: int, smoke: bool) -> tuple[list[Row], float]:
    """Run one cell with one seed on one thread; standard output is reserved for results, so prints go to stderr."""
    from threadpoolctl import threadpool_limits

    start = time.perf_counter()
    try:
        with threadpool_limits(1), contextlib.redirect_stdout(sys.stderr):
            rows = cell.run(seed, smoke, **cell.params)
    except SubspanError:
        raise
    except Exception as error:
        raise TaskFailed(f"cell {cell.name!r} failed with seed {seed}: {type(error).__name__}: {error}") from error
    return rows, time.perf_counter() - start


def _read_tasks(path: Path, fingerprint: str) -> dict[str, dict[str, Any]]:
    """Finished tasks by key. Lines of other sources, and a line cut short by an interruption, are passed over."""
    done = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            task = json.loads(line)
            if task["source"] == fingerprint:
                done[task["key"]] = task
    return done


def _append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Append one JSON line, after ending a line that an interruption cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(value, default=float).encode() + b"\n")


def _execute(
    tasks: Sequence[tuple[Cell, int]], smoke: bool, jobs: int | None, backend: Literal["loky", "ray"]
) -> Generator[tuple[int, list[Row], float], None, None]:
    """Run tasks in processes of one thread each; give (index, rows, seconds) as they finish."""
    import joblib

    calls = [joblib.delayed(_indexed_task)(index, *task, smoke) for index, task in enumerate(tasks)]
    if backend == "ray":
        try:
            import ray  # pyright: ignore[reportMissingImports]
            from ray.util.joblib import register_ray  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtra("--backend ray needs Ray, which is not installed: pip install ray") from error
        ray.init(ignore_reinit_error=True)  # the cluster of RAY_ADDRESS, or a local one
        register_ray()
        with joblib.parallel_config("ray", n_jobs=-1 if jobs is None else jobs):
            # Ray's backend gives a list when all is done; rounds as wide as the cluster keep what each round finished
            width = joblib.effective_n_jobs()
            for start in range(0, len(calls), width):
                yield from cast(list[tuple[int, list[Row], float]], joblib.Parallel()(calls[start : start + width]))
        return
    processes = min(jobs or os.cpu_count() or 1, len(tasks))
    with joblib.parallel_config("loky", n_jobs=processes, inner_max_num_threads=1):
        finished = joblib.Parallel(return_as="generator_unordered")(calls)
        yield from cast(Generator[tuple[int, list[Row], float], None, None], finished)


def _indexed_task(index: int, cell: Cell, seed: int, smoke: bool) -> tuple[int, list[Row], float]:
    return index, *_run_task(cell, seed, smoke)


# ------------------------------------------------------------------------------------------------------------- sweep


def sweep_seeds(claim: Claim, smoke: bool, count: int | None) -> list[int]:
    """The claim's seeds; with ``count`` the first of them, continued upwards when it asks for more."""
    seeds = list(claim.smoke_seeds if smoke else claim.seeds)
    if count is None:
        return seeds
    if count < 1:
        raise ConfigError(f"the number of seeds must be at least 1, got {count}")
    following = max(seeds) + 1
    return (seeds + list(range(following, following + count)))[:count]


def run_claim(
    claim: Claim,
    *,
    smoke: bool = False,
    seeds: int | None = None,
    jobs: int | None = None,
    fresh: bool = False,
    folder: str | os.PathLike[str] = RUNS,
    backend: Literal["loky", "ray"] = "loky",
    progress: bool = True,
) -> dict[str, Any]:
    """Run a claim's sweep and judge its statements.

    Args:
        claim: what to measure.
        smoke: the same path in seconds; the numbers prove nothing.
        seeds: how many seeds (default: the claim's own).
        jobs: worker processes, one thread each (default: one per core of this machine, or of the Ray cluster).
        fresh: measure everything again, also what an earlier run of the same sources finished.
        folder: results go to ``folder/<slug>/``; a later call resumes from there.
        backend: joblib backend; ``"ray"`` runs on a Ray cluster.
        progress: show progress on stderr.

    Returns:
        The object that ``subspan claims run --json`` prints, also written to ``folder/<slug>/full.json`` (or
        ``smoke.json``). ``seconds`` is the wall time of this call, ``task_seconds`` the sum over all tasks including
        the ``reused`` ones of earlier calls.

    Raises:
        ConfigError: ``seeds`` or ``jobs`` below 1.
        MissingExtra: ``backend="ray"`` without Ray.
        TaskFailed: a cell raised; what is finished is kept.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"the number of jobs must be at least 1, got {jobs}")
    start = time.perf_counter()
    numbers = sweep_seeds(claim, smoke, seeds)
    cells = claim.cells(smoke)
    tasks = [(cell, seed) for seed in numbers for cell in cells]
    keys = [_task_key(*task) for task in tasks]
    if repeated := {key for key in keys if keys.count(key) > 1}:
        raise ConfigError(f"claim {claim.slug!r} has the same cell twice: {min(repeated)}")

    form = "smoke" if smoke else "full"
    path = Path(folder) / claim.slug / f"{form}.jsonl"
    if fresh:
        path.unlink(missing_ok=True)
    fingerprint = claim_fingerprint(claim, smoke)
    done = _read_tasks(path, fingerprint)
    reused = sum(key in done for key in keys)
    missing = [task for task, key in zip(tasks, keys, strict=True) if key not in done]

    finished = _execute(missing, smoke, jobs, backend)
    with _progress(claim.slug, len(tasks), reused, show=progress) as advance, contextlib.closing(finished):
        for index, rows, seconds in finished if missing else ():
            cell, seed = missing[index]
            key = _task_key(cell, seed)
            done[key] = {"source": fingerprint, "key": key, "seconds": seconds, "rows": [asdict(row) for row in rows]}
            _append_line(path, done[key])
            advance(f"{cell.name} (seed {seed})")

    results = Results([Row(**row) for key in keys for row in done[key]["rows"]])
    outcome = _finite(
        {
            "slug": claim.slug,
            "title": claim.title,
            "smoke": smoke,
            "statements": [asdict(statement.judge(results)) for statement in claim.statements],
            "rows": results.summary(),
            "seeds": numbers,
            "seconds": round(time.perf_counter() - start, 3),
            "task_seconds": round(sum(done[key]["seconds"] for key in keys), 3),
            "reused": reused,
            "source": fingerprint,
        }
    )
    text = json.dumps(outcome, indent=1, default=float, allow_nan=False)
    write_text(path.with_suffix(".json"), text + "\n")
    return json.loads(text)


def _finite(value: Any) -> Any:
    """The same value with null for NaN and infinities, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _progress(slug: str, total: int, reused: int, show: bool) -> Iterator[Any]:
    """Give ``advance(label)``: a bar on a terminal, a line per finished task in a log."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, quiet=not show, highlight=False)
    if reused:
        console.print(
            f"{slug}: {reused} of {total} tasks were finished before; --fresh measures them again", markup=False
        )
    if not console.is_terminal:
        count = reused

        def log(label: str) -> None:
            nonlocal count
            count += 1
            console.print(f"{slug}: {count}/{total} {label}", markup=False)

        yield log
        return
    columns: Iterable[Any] = (
        TextColumn("{task.fields[slug]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total, completed=reused, slug=slug)
        yield lambda label: bar.update(task, advance=1, description=label)
