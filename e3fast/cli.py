"""The command line: e3fast train | eval | report | config. Bad input ends with one message and exit code 2."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

USAGE = """usage: e3fast train  RUN.toml [--section.key value ...]   train; --help after the file lists every flag
       e3fast eval   RUN.toml [--section.key value ...]   pass@k of a model on the run's held-out prompts
       e3fast serve  RUN.toml [--section.key value ...]   vLLM's server for that run, at its rollout.server_url
       e3fast report FOLDER                               write FOLDER/report.html again
       e3fast config [RUN.toml]                           print every setting with its meaning"""
FULL = (errno.ENOSPC, errno.EDQUOT)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 bad input or a full disk, 130 interrupted."""
    from e3fast.machine import set_threads
    from e3fast.memory import OutOfMemory
    from e3fast.rollout.engine import EngineError

    set_threads()  # before torch is imported
    sys.path.insert(0, "")  # rewards and methods of one's own are looked for in the current folder too
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if args else 2
    commands = {"train": train, "eval": evaluate, "serve": serve, "report": report, "config": config}
    if args[0] not in commands:
        return fail(f"unknown command {args[0]!r}\n{USAGE}")
    try:
        return commands[args[0]](args[1:])
    except (ValueError, OutOfMemory, EngineError) as error:
        return fail(str(error))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in FULL:
            kept = "what was written before is intact"
            advice = "free some space; --resume goes on from the last checkpoint, if there is one"
            return fail(f"the disk is full{where}; {kept}: {advice}")
        return fail(f"{error.strerror or error}{where}")
    except KeyboardInterrupt:
        return 130


def fail(message: str) -> int:
    print(f"e3fast: {message}", file=sys.stderr)
    return 2


def read_config(args: list[str]):  # noqa: ANN201 - RunConfig is imported late
    """A run file and the flags behind it."""
    import tyro

    from e3fast.config import RunConfig, load_config

    if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
        raise ValueError(f"name a run file first\n{USAGE}")
    if args[0] in ("-h", "--help"):
        return tyro.cli(RunConfig, args=args, prog="e3fast train RUN.toml")
    return tyro.cli(RunConfig, default=load_config(Path(args[0])), args=args[1:], prog=f"e3fast train {args[0]}")


def train(args: list[str]) -> int:
    config = read_config(args)
    from e3fast.train import train as run

    return 130 if run(config) else 0


def evaluate(args: list[str]) -> int:
    config = read_config(args)
    from e3fast.progress import evaluation_table, print_table
    from e3fast.session import evaluate_only

    print_table(evaluation_table(evaluate_only(config)))
    return 0


def serve(args: list[str]) -> int:
    config = read_config(args)
    from e3fast.rollout.open_engine import serve as run

    run(config)
    return 0


def report(args: list[str]) -> int:
    if len(args) != 1:
        raise ValueError(f"name one run folder\n{USAGE}")
    from e3fast.report import write_report

    print(write_report(Path(args[0])))
    return 0


def config(args: list[str]) -> int:
    from e3fast.config import RunConfig
    from e3fast.config_text import config_text

    print(config_text(read_config(args) if args else RunConfig()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
