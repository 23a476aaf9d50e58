"""What one mark costs, on and off, beside others that mark ranges: CPU time per pair of begin and end.

All variants run in one process, one sample of each per round, in an order that rotates. A sample is the time of the
thread in a loop of so many pairs, less that in the same loop without them, taken just before. The ring is emptied
before each sample; what the flusher needs for that is measured by `flush`.

nvidia-resiliency-ext asks for torch with CUDA, but runs without both:
`pip install --no-deps nvidia-resiliency-ext nvidia-cuda-cupti-cu12 nvidia-ml-py packaging`, and the folder of
libcupti.so.12 in `LD_LIBRARY_PATH`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.harness import Measure, Options, interleave
from lastgasp.steps import bits, writer
from lastgasp.steps.marks import Marks

ROUNDS, PAIRS = 101, 5000
ON_US, OFF_US = 0.5, 0.05

_TEMPLATE = """
def loop(clock, mark, session, pairs):
    begun = clock()
    for _ in pairs:
        pass
    between = clock()
    for _ in pairs:
        {statement}
    return (clock() - between) - (between - begun)
"""
HOISTED = "with mark: pass"
LOOKED_UP = "with session.mark('forward'): pass"
CALLS = "mark.begin(); mark.end()"
FLOOR = "mark(); mark()"
WAYS = {"with mark:": HOISTED, 'with session.mark("forward"):': LOOKED_UP, "mark.begin(); mark.end()": CALLS}


@dataclass(frozen=True)
class Variant:
    """One row.

    Attributes:
        name: of the row.
        statement: what is timed; it sees `mark` and `session`.
        mark, session: those.
        target: us; None for a comparison.
        before: called before each sample.
    """

    name: str
    statement: str
    mark: object
    session: object = None
    target: float | None = None
    before: Callable[[], object] = lambda: None
    loop: Callable[..., int] = field(init=False)

    def __post_init__(self) -> None:
        namespace: dict[str, Any] = {}
        exec(_TEMPLATE.format(statement=self.statement), namespace)
        object.__setattr__(self, "loop", namespace["loop"])

    def sample(self, pairs: int) -> float:
        """us per pair."""
        self.before()
        return self.loop(time.thread_time_ns, self.mark, self.session, range(pairs)) / pairs / 1e3


def measure(options: Options) -> list[Measure]:
    """CPU time per pair of begin and end."""
    rounds, pairs = (3, 200) if options.quick else (ROUNDS, PAIRS)
    missing: list[str] = []
    with contextlib.ExitStack() as stack:
        variants = [*_ours(stack), *_theirs(missing, stack)]
        calls: Mapping[str, Callable[[], float]] = {v.name: _sampler(v, pairs) for v in variants}
        for call in calls.values():
            call()
        samples = interleave(calls, rounds)
    notes = "; ".join(missing)
    return [
        Measure(
            name=v.name, unit="us", samples=samples[v.name], target=v.target,
            neighbour=f"not compared: {notes}" if notes and v is variants[0] else "",
        )
        for v in variants
    ]  # fmt: skip


def _sampler(variant: Variant, pairs: int) -> Callable[[], float]:
    return lambda: variant.sample(pairs)


def _ours(stack: contextlib.ExitStack) -> Iterator[Variant]:
    compiled = writer.choose().__name__.endswith("._ring")
    for python in (False, True) if compiled else (True,):
        for mask in (bits.ALL, 0):
            with _environ(writer.SWITCH, "1" if python else "0"):
                marks = Marks.open(rank=0, world_size=1, mask=mask)
            stack.callback(marks.close, remove=True)
            kind = "mark on" if mask else "mark off"
            target = None if python else ON_US if mask else OFF_US
            session = SimpleNamespace(mark=marks.mark)
            for way, statement in WAYS.items():
                name = f"{kind}{', Python fallback' if python else ''}: {way}"
                yield Variant(name, statement, marks.mark("forward"), session, target, _emptier(marks))


def _emptier(marks: Marks) -> Callable[[], object]:
    return lambda: marks.consumed(marks.head - marks.tail)


def _theirs(missing: list[str], stack: contextlib.ExitStack) -> Iterator[Variant]:
    yield Variant("two time.perf_counter_ns(), nothing kept", FLOOR, time.perf_counter_ns)
    record = torch.profiler.record_function
    yield Variant("torch.profiler.record_function, no profiler", "with mark('forward'): pass", record)
    for find in (_opentelemetry, _resiliency):
        try:
            yield from find(stack)
        except ImportError as error:
            missing.append(str(error))
        except Exception as error:  # its own set-up, such as a library of CUDA
            missing.append(f"{find.__doc__} cannot be started: {type(error).__name__}: {error}")


def _opentelemetry(stack: contextlib.ExitStack) -> Iterator[Variant]:
    """opentelemetry-sdk"""
    try:
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
    except ImportError as error:
        raise ImportError(f"opentelemetry-sdk (pip install 'lastgasp[bench]'): {error}") from None
    version = importlib.metadata.version("opentelemetry-sdk")
    recording = TracerProvider(shutdown_on_exit=False)
    recording.add_span_processor(SpanProcessor())
    off = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    for name, provider in (("recording, no exporter", recording), ("not sampled", off)):
        tracer = provider.get_tracer("lastgasp.benchmarks")
        stack.callback(provider.shutdown)
        yield Variant(
            f"OpenTelemetry {version} span, {name}", "with mark('forward'): pass", tracer.start_as_current_span
        )


def _resiliency(_: contextlib.ExitStack) -> Iterator[Variant]:
    """nvidia-resiliency-ext"""
    try:
        from nvidia_resiliency_ext.straggler import Detector  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(f"nvidia-resiliency-ext (see the head of benchmarks/bench_marks.py): {error}") from None
    # Never shut down: where there is no driver of CUDA, its CUPTI module (0.4.1) ends the process with SIGSEGV there.
    Detector.initialize(gather_on_rank0=False)
    version = importlib.metadata.version("nvidia-resiliency-ext")
    statement = "with mark('forward', profile_cuda=False): pass"
    yield Variant(
        f"nvidia-resiliency-ext {version} detection_section, CPU time only", statement, Detector.detection_section
    )


@contextlib.contextmanager
def _environ(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
