"""What can I type? Verbs live in one small file each and import their rooms only when they run."""

import os
import sys
from typing import Annotated, Any

import typer

from subspan import __version__
from subspan.cli import assets, audit, claims, compress, facilities, grow, hubs, inspect, tune
from subspan.errors import SubspanError

# Verbs that, run again after Ctrl-C, continue where they stopped.
_RESUMED = {"audit", "tune", "claims", "facilities", "grow", "compress", "inspect"}


class _Verbs(typer.core.TyperGroup):
    """Turns what a user can put right into one sentence and exit status 2; a bug keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            more = "; the same command continues where this one stopped" * (ctx.invoked_subcommand in _RESUMED)
            print(f"interrupted{more}", file=sys.stderr)
            sys.exit(130)
        except BrokenPipeError:  # the reader of our output left; that is no error of the user
            raise
        except (SubspanError, ValueError, OSError) as error:
            print(f"error: {_sentence(error)}", file=sys.stderr)
            sys.exit(2)


def _sentence(error: Exception) -> str:
    """The error on one line; for files the path first, without an error number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


app = typer.Typer(
    name="subspan",
    help="Learning through the few directions that matter.",
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("tune")(tune.tune)
app.command("audit")(audit.audit)
app.command("inspect")(inspect.inspect)
app.command("grow")(grow.grow)
app.command("compress")(compress.compress)
app.command("hubs")(hubs.hubs)
app.command("facilities")(facilities.facilities)
app.add_typer(claims.app, name="claims")
app.command("assets")(assets.assets)


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"subspan {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Learning through the few directions that matter."""


def main() -> None:
    """Entry point of the ``subspan`` command."""
    # Threads that spin while they wait cost nothing on an idle machine, but on a shared one they starve each other:
    # measured here, two busy neighbours made a training step three times slower with spinning than without.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app()
