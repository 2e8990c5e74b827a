"""Processes on a GPU each, told by name what to do: for benchmarks and tests of copies between them."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

START_SECONDS = 300.0  # it may have to compile kernels
ANSWER_SECONDS = 120.0

Deeds = Mapping[str, Callable[..., Any]]


class GpuProcess:
    """Made by ``gpu_process``. ``begin`` and ``answer`` apart: two processes can be busy at once."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self._process = process
        self._connection = connection

    def begin(self, name: str, *arguments: object) -> None:
        self._connection.send((name, arguments))

    def answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        """RuntimeError with the other's traceback, or when it says nothing."""
        if not self._connection.poll(seconds):
            raise RuntimeError(f"a process on a GPU said nothing for {seconds} s")
        failed, value = self._connection.recv()
        if failed:
            raise RuntimeError(value)
        return value

    def ask(self, name: str, *arguments: object) -> Any:
        self.begin(name, *arguments)
        return self.answer()

    def kill(self) -> None:
        """End it by SIGKILL, whatever it does."""
        self._process.kill()
        self._process.join()


@contextmanager
def gpu_process(gpu: int, make: Callable[[], Deeds], *others: int) -> Iterator[GpuProcess]:
    """``make`` runs in the process, whose first GPU is ``gpu``; what it returns can be asked for. It sees ``others``,
    too: those whose memory it is to map."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, visible(gpu, *others), make), daemon=True)
    process.start()
    theirs.close()
    try:
        other = GpuProcess(process, ours)
        other.answer(START_SECONDS)
        yield other
    finally:
        ours.close()
        process.join(10.0)
        if process.exitcode is None:
            process.kill()
            process.join()


def visible(gpu: int, *others: int) -> str:
    """What CUDA_VISIBLE_DEVICES is for a process on ``gpu``."""
    return ",".join(map(str, dict.fromkeys((gpu, *others))))


def _serve(connection: Connection, gpus: str, make: Callable[[], Deeds]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # before CUDA is first used
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    try:
        deeds = make()
        connection.send((False, None))
        while True:
            name, arguments = connection.recv()
            connection.send((False, deeds[name](*arguments)))
    except (EOFError, BrokenPipeError):
        return
    except BaseException:
        connection.send((True, traceback.format_exc()))
        raise
