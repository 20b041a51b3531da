"""The process that holds vLLM for a run on one machine: answers the verbs of `peers.ProcessPeer`, one at a time.

A process of its own, since vLLM takes torch's threads and process groups for itself, and can die without the trainer.
It ends when the trainer's end of the pipe closes.
"""

from __future__ import annotations

import os
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from e3fast.rollout.transfer import receive_shared

if TYPE_CHECKING:
    from e3fast.rollout.vllm_api import EngineSettings, InProcess


def host(conn: Connection, buffer: Tensor, settings: EngineSettings, log: Path) -> None:
    """Messages out: ("alive",), ("answer", index, answer), ("done", value), ("failed", message)."""
    redirect_output(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which ends its step first
    try:
        from e3fast.rollout.vllm_api import InProcess

        engine = InProcess(settings)
        conn.send(("done", None))
        serve(conn, buffer, engine)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the trainer is gone
    except BaseException as error:
        traceback.print_exc()
        conn.send(("failed", describe(error)))
        raise


def serve(conn: Connection, buffer: Tensor, engine: InProcess) -> None:
    while (message := conn.recv())[0] != "close":
        value: Any = None
        verb, *arguments = message
        if verb == "sample":
            for found in engine.sample(*arguments):
                conn.send(("answer", *found) if found else ("alive",))
        elif verb == "load":
            engine.load(receive_shared(conn, buffer, lambda: conn.send(("alive",))), *arguments)
        else:
            value = getattr(engine, verb)(*arguments)
        conn.send(("done", value))
    conn.send(("done", None))


def describe(error: BaseException) -> str:
    """In one line; vLLM's validation errors are long, and say what is wrong in the second."""
    return " ".join(str(error).split())[:400] or type(error).__name__


def redirect_output(log: Path) -> None:
    """vLLM's own words go to the log, C++ libraries' included."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
