"""Who trains when. Variants take turns, so that whatever else the machine does falls on all of them.

Where all fit into memory beside each other, each has a process and they take turns of a few steps (``"side by side"``).
Where they do not, they run one after the other in rounds, A B C and then C B A, each time from the start and with the
memory given back in between (``"one after the other"``). Only one of them computes at any moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning_liger.bench.job import Build
from lightning_liger.bench.messages import Done, Failure, Plan, Ready, Turn
from lightning_liger.bench.processes import Worker
from lightning_liger.bench.results import Comparison, Row
from lightning_liger.bench.variants import AS_PADDED, PLAIN, Variant

SIDE_BY_SIDE, IN_ROUNDS = "side by side", "one after the other"
INSIDE = "inside of this training"
# The variant that just ran leaves threads that spin for a while before they sleep.
_PAUSE = 0.3


class Schedule:
    """One comparison.

    Args:
        build: makes the job, in the processes that measure.
        variants: given what the plain run says of itself (None if it fails at once), all others.
        plan: how each run goes.
        order: :data:`SIDE_BY_SIDE`, :data:`IN_ROUNDS`, or None to choose by memory.
        seconds: no further round begins that would end after so many; None sets no limit.
        tell: is given one line for each turn.
    """

    def __init__(
        self,
        build: Build,
        variants: Callable[[Ready | None], Sequence[Variant]],
        plan: Plan,
        order: str | None = None,
        seconds: float | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._build = build
        self._plan = plan
        self._order = order
        self._seconds = seconds
        self._tell = tell
        self._began = time.perf_counter()
        self._workers: list[Worker] = []
        self._variants = variants
        self._plain: Ready | None = None
        self.result = Comparison(plan, [Row(PLAIN)])

    def run(self) -> Comparison:
        """Measure. Whatever fails is a row that says so."""
        plain = self.result.plain
        try:
            first = self._worker()
            warmed_up = self._begin(first, plain)
            if self._plain is None and not plain.out_of_memory:
                return self.result  # it did not come as far as a step, and nothing else will
            self.result.rows += map(Row, self._variants(self._plain))
            rows = [row for row in self.result.rows if not row.failure]
            order = self._order or self._by_memory(len(rows), plain)
            self.result.order = order
            if order == SIDE_BY_SIDE:
                self._side_by_side(rows, first if warmed_up else None)
            else:
                self._in_rounds(rows, first if warmed_up else None)
        finally:
            for worker in self._workers:
                worker.close()
        self.result.seconds = time.perf_counter() - self._began
        return self.result

    # -- one process each ------------------------------------------------------------------------------------------

    def _side_by_side(self, rows: list[Row], first: Worker | None) -> None:
        workers: dict[str, Worker] = {} if first is None else {rows[0].name: first}
        waiting = [row for row in rows[1:] if not row.failure]
        for row in waiting:  # they import and build at the same time
            workers[row.name] = self._worker()
            workers[row.name].order(self._with_budget(row.variant))
        ready = {row.name: workers[row.name].ready() for row in waiting}
        for row in waiting:
            self._warm_up(workers[row.name], row, ready[row.name])
        for number in self._rounds():
            for row in rows if number % 2 == 0 else rows[::-1]:
                if not row.failure:
                    time.sleep(_PAUSE)
                    self._measure(workers[row.name], row, number)
        for row in rows:
            if not row.failure:
                self._end(workers[row.name], row)

    # -- one process for all ---------------------------------------------------------------------------------------

    def _in_rounds(self, rows: list[Row], first: Worker | None) -> None:
        worker, begun = first, first is not None
        for number in self._rounds():
            for row in rows if number % 2 == 0 else rows[::-1]:
                if row.failure:
                    continue
                if worker is None or not worker.alive:
                    worker = self._worker()
                if begun or self._begin(worker, row):
                    self._measure(worker, row, number)
                begun = False
                if not row.failure:
                    self._end(worker, row)
                # what is left of a failed run must not weigh on the next one; nor must what a peer has patched, or what
                # an allocator of the CPU keeps
                if row.failure or row.variant.peer or self._plain is None or self._plain.kind == "cpu":
                    self._close(worker)
                    worker = None

    # -- steps of both ---------------------------------------------------------------------------------------------

    def _rounds(self) -> Iterator[int]:
        longest = 0.0
        for number in range(self._plan.turns):
            began = time.perf_counter()
            if number and self._seconds is not None and began - self._began + longest > self._seconds:
                self.result.notes.append(
                    f"{number} of {self._plan.turns} rounds fitted into the time limit of {self._seconds:.0f} s."
                )
                return
            yield number
            longest = max(longest, time.perf_counter() - began)

    def _begin(self, worker: Worker, row: Row) -> bool:
        worker.order(self._with_budget(row.variant))
        return self._warm_up(worker, row, worker.ready())

    def _warm_up(self, worker: Worker, row: Row, ready: Ready | Failure) -> bool:
        answer: Any = ready
        if isinstance(ready, Ready):
            self._plain = self._plain or ready
            self.result.device = self.result.device or ready.device
            row.precision, row.peak_flops = ready.precision, ready.peak_flops
            answer = worker.turn()
        if self._failed(row, answer):
            return False
        row.add_warm_up(answer)
        took = f"set up in {ready.seconds:.1f} s, " if isinstance(ready, Ready) else ""
        self._tell(f"{row.name}: {took}warm-up of {len(answer.seconds)} steps in {sum(answer.seconds):.1f} s")
        return True

    def _measure(self, worker: Worker, row: Row, number: int) -> None:
        answer = worker.turn()
        if not self._failed(row, answer):
            assert isinstance(answer, Turn)
            row.add_turn(answer)
            milliseconds = 1000 * sum(answer.seconds) / len(answer.seconds)
            self._tell(f"{row.name}: round {number + 1} of {self._plan.turns}, {milliseconds:,.1f} ms a step")

    def _end(self, worker: Worker, row: Row) -> None:
        answer = worker.stop()
        if not self._failed(row, answer):
            assert isinstance(answer, Done)
            row.end(answer)

    def _failed(self, row: Row, answer: Any) -> bool:
        if not isinstance(answer, Failure):
            return False
        row.fail(answer)
        self._tell(f"{row.name}: {answer.what}")
        return True

    def _with_budget(self, variant: Variant) -> Variant:
        """Batches as large as the padded ones were, once their size is known."""
        if variant.arguments.get("tokens") == AS_PADDED:
            return replace(variant, arguments={**variant.arguments, "tokens": self._largest()})
        if variant.defaults.get("max_tokens_per_batch", {}).get("max_tokens_per_batch") != AS_PADDED:
            return variant
        largest = self._largest()
        filled = {"max_tokens_per_batch": largest, "overlong": "own_batch"}
        options = filled if largest else {"max_tokens_per_batch": "keep_samples"}
        return replace(variant, defaults={**variant.defaults, "max_tokens_per_batch": options})

    def _largest(self) -> int:
        return max((row.largest for row in self.result.rows if row.variant.same_batches), default=0)

    def _by_memory(self, count: int, row: Row) -> str:
        if row.failure or not row.warm_ups:
            return IN_ROUNDS
        last = row.warm_ups[-1]
        return SIDE_BY_SIDE if last.needs * (count - 1) * 1.1 < last.free else IN_ROUNDS

    def _worker(self) -> Worker:
        made = Worker(self._build, self._plan)
        self._workers.append(made)
        return made

    def _close(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.close()
