"""Sequences with a slot and their pages: slots, registry and page table move together here."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from paged_trt.plugins.attention import FULL_WINDOW
from paged_trt.plugins.errors import PagesExhausted, SequenceError
from paged_trt.plugins.kv import (
    UNUSED_PAGE_ENTRY,
    first_visible_page,
    full_pages,
    page_positions,
    pages_for_tokens,
    tokens_in_pages,
)
from paged_trt.plugins.manifest import geometry_sha256
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.page_contents import ReuseTag
from paged_trt.runtime.page_table import PageTable
from paged_trt.runtime.registry import PageRegistry
from paged_trt.runtime.scheduler import Segment, StepPlan
from paged_trt.runtime.sequences import LiveSequence

PageCopies = list[tuple[int, int]]
"""`(source, target)` of pages whose keys and values are to be copied before the step."""


class Batch:
    """Running sequences by slot, without gaps: n of them hold the slots 0 to n - 1.

    Invariant: the row of a slot holds the pages of its sequence, and every reference of the
    registry belongs to a running sequence.

    Only full pages are shared between requests, and nobody writes a full page. A fork shares
    the page that is being filled too: who writes to it first gets a copy.

    Args:
        spec: interface of the engine.
        page_order: as `free_order` of the registry.
        reuses_prefixes: let a prompt begin with pages that hold its first tokens already.
        records_freed: as of the registry.

    Attributes:
        registry: owner of the pages.
        table: rows of the slots.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        page_order: Sequence[int] | None = None,
        reuses_prefixes: bool = True,
        records_freed: bool = False,
    ) -> None:
        self._capacity = spec.pool.max_batch_size
        self._by_slot: list[LiveSequence] = []
        self._reuses_prefixes = reuses_prefixes
        self._window = spec.widest_window
        self._tag = ReuseTag(
            model=geometry_sha256(spec),
            kv_cache_dtype=spec.kv_cache_dtype.value,
            windows=tuple(layer.window for layer in spec.layers),
        )
        self.registry = PageRegistry(spec.pool, free_order=page_order, records_freed=records_freed)
        self.table = PageTable(spec.pool)

    def __len__(self) -> int:
        return len(self._by_slot)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(tuple(self._by_slot))

    @property
    def has_free_slot(self) -> bool:
        """Whether one more sequence fits."""
        return len(self._by_slot) < self._capacity

    def admit(self, sequence: LiveSequence) -> None:
        """Give a sequence the next slot, and pages for all tokens that it has so far.

        Its first pages are those that hold its first tokens already. At least one token is
        left to run, because only a token that is run has logits.

        Raises:
            SequenceError: every slot is taken.
            PagesExhausted: too few pages are free; nothing was changed.
        """
        if not self.has_free_slot:
            raise SequenceError(
                f"{len(self)} sequences are running and the engine has max_batch_size="
                f"{self._capacity}; release one, or rebuild with a larger `--max-batch-size`"
            )
        root = self.registry.root(dataclasses.replace(self._tag, adapter=sequence.adapter))
        known = sequence.tokens[: sequence.num_tokens - 1]
        found = self.registry.find(root, known) if self._reuses_prefixes else []
        shared = [page_id for page_id, _ in found]
        self.registry.share(shared)
        try:
            count = pages_for_tokens(sequence.num_tokens) - len(shared)
            self._give(sequence, shared, count, slot=len(self._by_slot))
        except BaseException:
            self.registry.release(shared)
            raise
        self._by_slot.append(sequence)
        sequence.slot = len(self._by_slot) - 1
        sequence.past_len = page_positions(len(shared)).start
        sequence.num_described = len(shared)
        sequence.content = found[-1][1] if found else root
        self.free_unseen(sequence, sequence.past_len)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.past_len

    def reuse_more(self, sequence: LiveSequence) -> int:
        """Take pages that became known since the sequence was admitted, for its own empty ones.

        Prompts that arrive together begin alike often: what the first of them has run, the
        others need not run again.

        Returns:
            Tokens that the sequence need not run.
        """
        index = sequence.num_described
        is_at_page = sequence.past_len == page_positions(index).start
        if not self._reuses_prefixes or not is_at_page or sequence.content is None:
            return 0
        left = sequence.tokens[sequence.past_len : sequence.num_tokens - 1]
        found = self.registry.find(sequence.content, left)
        if not found:
            return 0
        shared = [page_id for page_id, _ in found]
        end = index + len(shared)
        own = sequence.pages[index:end]
        pages = [*sequence.pages[:index], *shared, *sequence.pages[end:]]
        self.registry.share(shared)
        try:
            self._commit(sequence.slot, pages)
        except BaseException:
            self.registry.release(shared)
            raise
        sequence.pages = pages
        self.registry.release(own)
        reused = tokens_in_pages(len(shared))
        sequence.past_len += reused
        sequence.num_described, sequence.content = end, found[-1][1]
        self.free_unseen(sequence, sequence.past_len)
        return reused

    def fork(self, source: LiveSequence, target: LiveSequence) -> None:
        """Give a sequence the next slot, and the pages of another one, which it goes on from.

        It goes on from the tokens that are known: what a running step gives `source` is not its
        own, and the token that this step runs is run again on a copy of its page.

        Raises:
            SequenceError: every slot is taken, or `source` has no slot or prefills.
        """
        has_text = source.decodes and source.num_known > source.prompt_len
        if source not in self._by_slot or not has_text or not self.has_free_slot:
            raise SequenceError(
                f"sequence {source.sequence_id} cannot be forked now: its prompt must be done, it "
                f"must have a slot, and so must the fork ({len(self)} of {self._capacity} slots "
                "are taken); try again after a step"
            )
        pages = [page for page in source.pages if page != UNUSED_PAGE_ENTRY]
        self.registry.share(pages)
        try:
            self.table.commit({len(self._by_slot): source.pages}, shared=pages)
        except BaseException:
            self.registry.release(pages)
            raise
        self._by_slot.append(target)
        target.slot = len(self._by_slot) - 1
        target.pages = list(source.pages)
        target.past_len = target.num_cached = source.num_known - 1
        target.content, target.num_described = source.content, source.num_described
        # Both must look before they write: the page that is being filled is shared.
        source.room, target.room = source.past_len, target.past_len

    def get(self, sequence_id: int) -> LiveSequence | None:
        """The running sequence with this id."""
        return next((each for each in self._by_slot if each.sequence_id == sequence_id), None)

    def grow(self, plan: StepPlan) -> PageCopies:
        """Give each sequence of a step the pages that its tokens need.

        Returns:
            What must be copied before the step: pages that a fork shares and that the step
            writes.

        Raises:
            PagesExhausted: not all of them can have theirs; no page changed its owner.
        """
        copies: PageCopies = []
        # In most decode steps nobody comes to the end of a page.
        needy = [
            each
            for each in plan.segments
            if each.sequence.past_len + each.num_tokens > each.sequence.room
        ]
        if needy:
            self._require_free(needy)
        for segment in needy:
            sequence = segment.sequence
            missing = pages_for_tokens(segment.end) - len(sequence.pages)
            shared_tail = self._shared_tail(sequence)
            if shared_tail is not None:
                copies.append(self._replace(sequence, shared_tail))
            if missing > 0:
                self._give(sequence, sequence.pages, missing, slot=sequence.slot)
            sequence.room = tokens_in_pages(len(sequence.pages))
        return copies

    def review(self, sequence: LiveSequence, end: int) -> None:
        """Look at the pages of a sequence whose tokens up to `end` are in the pool for sure.

        Full pages are described to the registry, so that others can begin with them, and the
        pages that no layer sees any more are given back.
        """
        if end < sequence.review_at:
            return
        for index in range(sequence.num_described, full_pages(end)):
            if sequence.content is not None and self._reuses_prefixes:
                sequence.content = self.registry.describe(
                    sequence.pages[index],
                    sequence.content,
                    sequence.tokens[page_positions(index)],
                )
            sequence.num_described = index + 1
        self.free_unseen(sequence, end)
        sequence.review_at = end + 1
        if self._window == FULL_WINDOW:
            sequence.review_at = tokens_in_pages(sequence.num_described + 1)

    def free_unseen(self, sequence: LiveSequence, end: int) -> None:
        """Give back the pages that no layer sees from position `end` on."""
        first = first_visible_page(end, self._window)
        unseen = [page for page in sequence.pages[:first] if page != UNUSED_PAGE_ENTRY]
        if not unseen:
            return
        kept = [UNUSED_PAGE_ENTRY] * first + sequence.pages[first:]
        self._commit(sequence.slot, kept)
        sequence.pages = kept
        self.registry.release(unseen)

    def drop(self, sequence: LiveSequence) -> None:
        """Free the pages and the slot of a sequence; nothing to do where it has no slot.

        The sequence of the last slot moves to the free one, so that a decode step finds its
        rows side by side. Only the row moves.
        """
        if sequence not in self._by_slot:
            return
        slot, last = sequence.slot, self._by_slot.pop()
        self.table.clear(slot)
        if last is not sequence:
            self.table.move(last.slot, slot)
            last.slot = slot
            self._by_slot[slot] = last
        pages = [page for page in sequence.pages if page != UNUSED_PAGE_ENTRY]
        sequence.forget_pages()
        self.registry.release(pages)

    def discard(self, sequence: LiveSequence) -> None:
        """As `drop`, of a sequence whose pages may hold what is no number.

        Nobody begins with its pages any more, nor with what goes on from them; those who share
        them already keep them.
        """
        pages = [page for page in sequence.pages if page != UNUSED_PAGE_ENTRY]
        self.drop(sequence)
        self.registry.forget(pages)

    def _require_free(self, segments: Iterable[Segment]) -> None:
        wanted = 0
        sharers: collections.Counter[int] = collections.Counter()
        for segment in segments:
            sequence = segment.sequence
            wanted += max(0, pages_for_tokens(segment.end) - len(sequence.pages))
            shared_tail = self._shared_tail(sequence)
            if shared_tail is not None:
                sharers[sequence.pages[shared_tail]] += 1
        # Who writes last to a page that only sequences of this step hold writes to the page itself.
        wanted += sum(
            min(times, self.registry.reference_count(page) - 1) for page, times in sharers.items()
        )
        if wanted > self.registry.num_free:
            raise PagesExhausted(wanted, self.registry.num_free)

    def _shared_tail(self, sequence: LiveSequence) -> int | None:
        """Index of the page that the next token goes to, where others hold it too."""
        index = full_pages(sequence.past_len)
        if index >= len(sequence.pages):
            return None
        return index if self.registry.reference_count(sequence.pages[index]) > 1 else None

    def _replace(self, sequence: LiveSequence, index: int) -> tuple[int, int]:
        source = sequence.pages[index]
        [target] = self.registry.allocate(1)
        pages = [*sequence.pages]
        pages[index] = target
        try:
            self._commit(sequence.slot, pages)
        except BaseException:
            self.registry.release([target])
            raise
        sequence.pages = pages
        self.registry.release([source])
        return source, target

    def _give(self, sequence: LiveSequence, pages: Sequence[int], count: int, *, slot: int) -> None:
        added = self.registry.allocate(count)
        try:
            self._commit(slot, [*pages, *added])
        except BaseException:
            self.registry.release(added)
            raise
        sequence.pages = [*pages, *added]

    def _commit(self, slot: int, pages: Sequence[int]) -> None:
        shared = {page for page in pages if page >= 0 and self.registry.reference_count(page) > 1}
        self.table.commit({slot: pages}, shared=shared)
