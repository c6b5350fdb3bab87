"""The barriers of the Hopper forward at head dims 192 and 256 as a model: every warp a coroutine, scheduled
at random, one of them slow. Nobody may wait for ever or find a stage overwritten; without the barrier
behind a skipped tile of V some do. Names are those of hopper/fwd_load.h and hopper/fwd_mma.h.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

WARPS, WARPGROUPS, STAGES = 4, 2, 2
Steps = Iterator[None]
Item = tuple[int, list[bool], list[bool]]  # tiles; for each warpgroup: the first one skipped, the last one


class Barrier:
    """An mbarrier; copies arrive with `arrive`, counted like a thread."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.phase = 0

    def arrive(self) -> None:
        self.pending -= 1
        if self.pending == 0:
            self.pending, self.phase = self.count, self.phase ^ 1

    def wait(self, parity: int) -> Steps:
        while self.phase == parity:
            yield


class Gather:
    """A named barrier, or products that all warps of a warpgroup issue; `then` happens once."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.turn = count, 0, 0

    def arrive(self, then: Callable[[], None] | None = None) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.turn = 0, self.turn + 1
            if then:
                then()

    def sync(self, then: Callable[[], None] | None = None) -> Steps:
        turn = self.turn
        self.arrive(then)
        while self.turn == turn:
            yield


class Ring:
    """Filled stages of K or V: what is there, who has still to read it."""

    def __init__(self) -> None:
        self.full = [Barrier(1) for _ in range(STAGES)]
        self.empty = [Barrier(WARPGROUPS) for _ in range(STAGES)]
        self.holds: list[tuple[int, int] | None] = [None] * STAGES
        self.readers = [0] * STAGES


class Forward:
    def __init__(self, items: list[Item], seed: int, gather_skips: bool) -> None:
        self.random, self.items, self.gather_skips = random.Random(seed), items, gather_skips
        self.k, self.v = Ring(), Ring()
        self.q_full = [Barrier(1) for _ in range(WARPGROUPS)]
        self.q_empty = [Barrier(WARPS + (part == 0)) for part in range(WARPGROUPS)]
        self.item_full = Barrier(1)
        self.baton = [Gather(2 * WARPS) for _ in range(WARPGROUPS)]
        self.products = [Gather(WARPS) for _ in range(WARPGROUPS)]
        self.skipped = [Gather(WARPS) for _ in range(WARPGROUPS)]
        self.copies: list[Callable[[], None]] = []
        self.overtaken = 0

    def load_rows(self) -> Steps:
        for n in range(len(self.items) + 1):
            for part in range(WARPGROUPS):
                yield from self.q_empty[part].wait(n & 1 ^ 1)
                if part == 0:
                    self.item_full.arrive()
                self.copies.append(self.q_full[part].arrive)
                yield

    def load(self, ring: Ring, count: int, item: int, tile: int) -> Steps:
        stage = count % STAGES
        yield from ring.empty[stage].wait(count // STAGES & 1 ^ 1)
        self.overtaken += ring.readers[stage] != 0

        def arrives() -> None:
            ring.holds[stage], ring.readers[stage] = (item, tile), WARPGROUPS * WARPS
            ring.full[stage].arrive()

        self.copies.append(arrives)
        yield

    def load_keys(self) -> Steps:
        count = 0  # of tiles before the item
        for n, (tiles, _, _) in enumerate(self.items):
            yield from self.item_full.wait(n & 1)
            for i in range(tiles + 1):  # K runs ahead of V
                if i < tiles:
                    yield from self.load(self.k, count + i, n, i)
                if i > 0:
                    yield from self.load(self.v, count + i - 1, n, i - 1)
            count += tiles
            self.q_empty[0].arrive()

    def consume(self, warpgroup: int, signals: bool) -> Steps:
        baton, products = self.baton, self.products[warpgroup]
        count = n = 0
        if warpgroup == WARPGROUPS - 1:
            baton[0].arrive()

        def wait(ring: Ring, tile: int) -> Steps:
            at = count + tile
            yield from ring.full[at % STAGES].wait(at // STAGES & 1)
            self.overtaken += ring.holds[at % STAGES] != (n, tile)

        def release(ring: Ring, tile: int) -> None:
            if signals:
                ring.empty[(count + tile) % STAGES].arrive()

        def have_read(ring: Ring, tile: int, warps: int) -> None:
            ring.readers[(count + tile) % STAGES] -= warps

        def multiply(ring: Ring, tile: int) -> Steps:
            yield from products.sync()  # issued by all warps
            yield
            yield from products.sync(lambda: have_read(ring, tile, WARPS))
            release(ring, tile)

        def skip(ring: Ring, tile: int) -> Steps:
            yield from wait(ring, tile)
            have_read(ring, tile, 1)
            if ring is self.k:
                yield from baton[warpgroup].sync()
                baton[1 - warpgroup].arrive()
            elif self.gather_skips:
                yield from self.skipped[warpgroup].sync()
            release(ring, tile)

        for n, (tiles, skips_first, skips_last) in enumerate(self.items):
            yield from self.q_full[warpgroup].wait(n & 1)
            first, last = int(skips_first[warpgroup]), tiles - 1 - int(skips_last[warpgroup])
            if first > 0:
                yield from skip(self.k, 0)
            for i in range(first, last + 1):
                yield from wait(self.k, i)
                yield from baton[warpgroup].sync()
                yield from products.sync()
                if i > first:
                    yield from wait(self.v, i - 1)
                    yield from products.sync()
                baton[1 - warpgroup].arrive()
                yield from multiply(self.k, i)
                if i == last:
                    self.q_empty[warpgroup].arrive()
                if i > first:
                    yield from multiply(self.v, i - 1)
                elif first > 0:
                    yield from skip(self.v, 0)
            if tiles > 0:
                yield from wait(self.v, last)
                yield from multiply(self.v, last)
            else:
                self.q_empty[warpgroup].arrive()
            if last < tiles - 1:
                yield from skip(self.k, tiles - 1)
                yield from skip(self.v, tiles - 1)
            count += tiles

    def run(self) -> bool:
        """Whether all warps come to their end and nobody is overtaken."""
        warps = [self.consume(w, i == 0) for w in range(WARPGROUPS) for i in range(WARPS)]
        slow = self.random.choice(warps)
        alive, idle = [self.load_rows(), self.load_keys(), *warps], 0
        while alive and idle < 20_000:
            if self.copies and self.random.random() < 0.3:
                self.copies.pop(self.random.randrange(len(self.copies)))()
                idle = 0
            warp = self.random.choice(alive)
            if warp is slow and self.random.random() < 0.97:
                continue
            idle += 1
            try:
                next(warp)
            except StopIteration:
                alive.remove(warp)
                idle = 0
        return not alive and self.overtaken == 0


def runs(gather_skips: bool, count: int = 40) -> list[bool]:
    draw = random.Random(0)

    def flags(tiles: int) -> list[bool]:
        return [tiles > 2 and draw.random() < 0.5 for _ in range(WARPGROUPS)]

    outcomes = []
    for seed in range(count):
        sizes = [draw.choice([0, 1, 2, 3, 3, 4, 5, 9]) for _ in range(draw.randint(1, 8))]
        items = [(tiles, flags(tiles), flags(tiles)) for tiles in sizes]
        outcomes.append(Forward(items, seed, gather_skips).run())
    return outcomes


def test_no_warp_waits_for_ever_or_is_overtaken() -> None:
    assert all(runs(gather_skips=True))


def test_without_the_barrier_behind_skipped_values_some_do() -> None:
    assert not all(runs(gather_skips=False))
