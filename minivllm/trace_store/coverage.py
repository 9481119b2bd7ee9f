"""Which steps of the catalogue recorded runs show, which they could not show and why, and which are missing.

vLLM 0.25.1: none
Articles: part 1, part 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minivllm.trace_store import Span, TraceStore
from minivllm.tracing.catalogue import LEVEL_NAMES, SPANS, SpanSpec

SHOWN, EXCUSED, MISSING = "shown", "could not be shown", "missing"
_LOW_LEVEL = "recorded at level"
_BUILT_IN_WORKER = "minivllm.worker.gpu_worker.Worker"


@dataclass(frozen=True, slots=True)
class Coverage:
    """What some runs say about one step of the catalogue.

    Attributes:
        status: SHOWN, EXCUSED or MISSING.
        counts: how often each run shows it.
        reasons: with EXCUSED, why each run could not show it; with MISSING, in which runs it should have been.
        note: with SHOWN, what the step says about not having been done, if anything.
    """

    spec: SpanSpec
    status: str
    counts: tuple[int, ...]
    reasons: tuple[str, ...] = ()
    note: str = ""

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class Report:
    """Coverage of a set of runs.

    Attributes:
        runs: what the runs are called.
        rows: one per row of the catalogue, in its order.
        unknown: span names of the runs that the catalogue does not have.
    """

    runs: list[str]
    rows: list[Coverage] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def with_status(self, status: str) -> list[Coverage]:
        return [row for row in self.rows if row.status == status]

    @property
    def complete(self) -> bool:
        return not self.unknown and not self.with_status(MISSING)


def cover(stores: Sequence[TraceStore], names: Sequence[str]) -> Report:
    """Compare runs with the catalogue.

    Args:
        names: what to call the runs, as many as there are stores.
    """
    runs = [_RunFacts(store) for store in stores]
    report = Report(list(names))
    for spec in SPANS.values():
        counts = tuple(len(run.store.spans(spec.name)) for run in runs)
        if any(counts):
            skipped = [span for run in runs for span in run.store.spans(spec.name) if span.get("skipped")]
            note = ""
            if len(skipped) == sum(counts):
                note = f"skipped: {skipped[0].get('reason', 'it does not say why')}"
            report.rows.append(Coverage(spec, SHOWN, counts, note=note))
            continue
        excuses = [run.excuse(spec) for run in runs]
        owing = [name for name, excuse in zip(names, excuses, strict=True) if not excuse]
        if owing:
            report.rows.append(Coverage(spec, MISSING, counts, tuple(owing)))
        else:
            reasons = tuple(dict.fromkeys(excuses))
            # A run with a higher level says more than one that did not record such steps at all.
            telling = tuple(reason for reason in reasons if not reason.startswith(_LOW_LEVEL))
            report.rows.append(Coverage(spec, EXCUSED, counts, telling or reasons))
    found = {span.name for run in runs for span in run.store.spans()}
    report.unknown = sorted(found - set(SPANS))
    return report


def conditions(store: TraceStore) -> dict[str, str]:
    """What the catalogue's conditions come to in a run: condition -> why it did not hold, "" if it did."""
    return {when: judge() for when, judge in _RunFacts(store).conditions.items()}


class _RunFacts:
    """What one run was like, as far as it decides which steps it could show."""

    def __init__(self, store: TraceStore) -> None:
        self.store = store
        root = store.root
        recorded = {span.name for span in store.spans()}
        said = root.get("trace_level") if root is not None else None
        self.level_is_said = said in LEVEL_NAMES
        self.level = (
            LEVEL_NAMES.index(str(said))
            if self.level_is_said
            else max((SPANS[name].level for name in recorded if name in SPANS), default=0)
        )
        self.has_engine = bool({"engine_core.init", "engine_core.spawn"} & recorded)
        self.own_engine_process = any(p.role == "engine_core" for p in store.processes())
        self.has_workers = any(p.role == "worker" for p in store.processes()) or bool(
            store.spans("executor.make_worker_process")
        )
        self.has_requests = bool(store.spans("request"))
        self.pp = self._size(root, "pipeline_parallel_size", "pp")
        self.tp = self._size(root, "tensor_parallel_size", "tp")
        self.start_methods = {
            str(span.get("start_method")) for span in store.spans("executor.make_worker_process")
        }
        self.worker_classes = {str(span.get("worker_cls")) for span in store.spans("worker.init_worker")}
        self.failure = store.first_failure()
        self.conditions: dict[str, Callable[[], str]] = {
            "multiprocess executor": self._one_process,
            "EngineCore in a process of its own": self._engine_inside,
            "start method fork": self._no_fork,
            "async scheduling": lambda: (
                "" if self._has("engine_core.init_scheduler", self._is_async) else "no async scheduling"
            ),
            "an RPC with a callable": lambda: "no RPC with a callable",
            "a KV output aggregator": lambda: "no KV output aggregator",
            "non-blocking RPCs": lambda: (
                ""
                if self._has("rpc.call", lambda span: bool(span.get("non_block")))
                else "no non-blocking RPC"
            ),
            "a group of more than one rank": lambda: "" if self.tp > 1 else "no group of more than one rank",
            "pipeline parallel": lambda: "" if self.pp > 1 else "pipeline parallel size 1",
            "structured output": lambda: "no request had a grammar",
            "speculative decoding": lambda: "no speculative decoding",
            "execute_dummy_batch is called": lambda: "executor.execute_dummy_batch was not called",
            "check_health is called": lambda: "executor.check_health was not called",
            "a worker dies": lambda: "" if self._a_worker_died() else "no worker died",
            "the executor fails": lambda: "" if self._a_worker_died() else "no executor failed",
            "a method raises on a worker": self._nothing_raised,
            "the death pipe closes": self._one_process,
            "a worker outlives the polite request": lambda: (
                "" if self._has("executor.terminate_graceful", _some_left) else "all workers left when asked"
            ),
            "a worker outlives SIGTERM": lambda: (
                "" if self._has("executor.terminate_sigterm", _some_left) else "no worker outlived SIGTERM"
            ),
        }

    def excuse(self, spec: SpanSpec) -> str:
        """Why this run could not show a step; empty when it should have."""
        if spec.level > self.level and (self.level_is_said or self.failure is None):
            return f"{_LOW_LEVEL} {LEVEL_NAMES[self.level]}"
        if spec.when:
            reason = self.conditions[spec.when]()
            if reason:
                return reason
        if not self.has_engine and _belongs_to_engine(spec.name):
            return "an executor without an engine"
        if not self.has_requests and _needs_requests(spec):
            return "no requests"
        if self.worker_classes and _BUILT_IN_WORKER not in self.worker_classes and _belongs_to_worker(spec):
            return f"a worker class of its own: {', '.join(sorted(self.worker_classes))}"
        if self.failure is not None:
            # Whatever comes later in a healthy run, this one did not get there, or took another way out.
            return f"the run failed in {self.failure.name}"
        return ""

    # --- what the conditions of the catalogue ask

    def _size(self, root: Span | None, on_root: str, on_sizes: str) -> int:
        values = [span.get(on_sizes) for span in self.store.spans("executor.parallel_sizes")]
        said = root.get(on_root) if root is not None else None
        return int(said or next((value for value in values if value), 1))

    def _no_fork(self) -> str:
        if not self.start_methods:
            return self._one_process() or "no worker was started"
        methods = " and ".join(sorted(self.start_methods))
        return "" if "fork" in self.start_methods else f"start method {methods}, not fork"

    def _has(self, name: str, wanted: Callable[[Span], bool]) -> bool:
        return any(wanted(span) for span in self.store.spans(name))

    @staticmethod
    def _is_async(span: Span) -> bool:
        return int(span.get("batch_queue_size") or 1) > 1

    def _one_process(self) -> str:
        return "" if self.has_workers else "no worker processes (UniProcExecutor)"

    def _engine_inside(self) -> str:
        if not self.has_engine:
            return "an executor without an engine"
        return "" if self.own_engine_process else "EngineCore in the client's process"

    def _a_worker_died(self) -> bool:
        return self._has(
            "worker.process",
            lambda span: span.attributes.get("process.exit.code", 0) != 0 and not self._was_ended(span),
        )

    def _was_ended(self, life: Span) -> bool:
        """Whether the executor had asked this worker to end: then its death is no failure."""
        asked = [span.start_ns for span in self.store.spans("executor.close_death_writers")]
        return any(start_ns <= life.end_ns for start_ns in asked)

    def _nothing_raised(self) -> str:
        raised = self._has("rpc.execute", lambda span: span.is_error and not span.unfinished)
        return "" if raised else "no method raised on a worker"


def _some_left(span: Span) -> bool:
    return bool(span.get("left"))


def _belongs_to_engine(name: str) -> bool:
    return name in ("run", "request") or name.startswith(("engine_core.", "scheduler."))


def _needs_requests(spec: SpanSpec) -> bool:
    return spec.per in ("request", "step")


def _belongs_to_worker(spec: SpanSpec) -> bool:
    """Steps of the built-in Worker and below it, which another worker class need not take."""
    places = ("minivllm.worker.gpu", "minivllm.model_executor.", "minivllm.distributed.parallel_state.")
    return spec.method.startswith(places)
