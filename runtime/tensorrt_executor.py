"""Runs `model.plan` of an engine directory on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.callback_errors import CALLBACK_ERRORS
from paged_trt.plugins.device import Device, Stream
from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.operands import StepShape
from paged_trt.plugins.tensorrt_messages import tensorrt_error
from paged_trt.plugins.tensors import EngineSpec, pool_output_name
from paged_trt.plugins.trt import LogLines
from paged_trt.runtime.bindings import Binding, BoundContext, Staging, StepBuffers
from paged_trt.runtime.executor import (
    Choices,
    Draw,
    StepInputs,
    StepLauncher,
    require_next_tokens,
)
from paged_trt.runtime.graph import Bucket, DecodeGraphs
from paged_trt.runtime.kv_scales import checked_scales
from paged_trt.runtime.layer_buffers import LayerBuffers, require_layer_outputs
from paged_trt.runtime.pool import (
    DeviceArena,
    allocate_pools,
    copy_pages,
    download_pages,
    layer_pools,
    poison_pages,
)
from paged_trt.runtime.requests import GREEDY
from paged_trt.runtime.sampler import Sampling
from paged_trt.runtime.step_sampling import Sampled, StepSampler, TokenTaker, sampled_on_host
from paged_trt.runtime.warm_steps import decode_steps, prefill_steps

CONTEXT_PROFILE: Final = 0
"""Profile of prefill and mixed steps."""
GENERATION_PROFILE: Final = 1
"""Profile of decode steps, T = N."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStats:
    """Counts since the executor was made.

    Attributes:
        steps: steps that gave logits or next tokens.
        graph_captures: CUDA graphs captured.
        graph_replays: decode steps that a graph ran.
        graph_fallbacks: decode steps that a graph should have run and did not.
        input_copies: host-to-device copies of step inputs, one per step.
        table_copies: host-to-device copies of the page table.
        output_copies: device-to-host copies, one per step.
        allocations: device and page-locked allocations; all are made at load.
        device_bytes: device memory of pools, step buffers and activations, without weights.
        contexts: execution contexts, one for prefill and one for each bucket of decode steps.
        wait_seconds: how long steps waited for the device once all of their work was handed over.
    """

    steps: int
    graph_captures: int
    graph_replays: int
    graph_fallbacks: int
    input_copies: int
    table_copies: int
    output_copies: int
    allocations: int
    device_bytes: int
    contexts: int
    wait_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step that runs, and where its tokens arrive.

    Attributes:
        shape: of the step.
        staging: page-locked memory of the step.
        has_logprobs: whether logprobs arrive too.
    """

    shape: StepShape
    staging: Staging
    has_logprobs: bool


class TensorRtExecutor:
    """A deserialized engine with its pools and buffers on one device.

    `open_engine` of `tensorrt_loader` makes one from an engine directory. It serves one thread at
    a time, and `close` is called when no step runs.

    Args:
        engine: TensorRT engine of `spec`, checked.
        spec: interface of the engine.
        device: where the engine is.
        kv_scales: scales input name -> `[2, num_kv_heads]` float32; needed where the pools are
            quantised.
        notes: what a report must say.
        lines: log of the runtime that made the engine.
        keep: what must outlive the engine, such as the runtime that made it.
        make_context: from the engine and a profile to an execution context without memory of
            its own, None where TensorRT refuses.
        keep_compiled: called after a step, or all of `warm_up`, for which TensorRT may have
            compiled kernels; the device's context is current.
        uses_graphs: replay decode steps as CUDA graphs.
        sampling_kernel: the loaded kernel; None draws on the host.
        token_kernel: the loaded kernel that takes tokens over from the step before; None where no
            step is launched before the one before is collected.

    Raises:
        ExecutionError: there is too little memory, or TensorRT refused; everything that was
            allocated is free again.
        ManifestError: scales are missing or misshapen.
    """

    def __init__(
        self,
        engine: Any,
        spec: EngineSpec,
        device: Device,
        *,
        kv_scales: Mapping[str, npt.NDArray[np.float32]] | None = None,
        notes: tuple[str, ...] = (),
        lines: LogLines | None = None,
        keep: object = None,
        make_context: Callable[[Any, int], Any] = lambda engine, _: (
            engine.create_execution_context()
        ),
        keep_compiled: Callable[[], None] = lambda: None,
        uses_graphs: bool = True,
        sampling_kernel: Any = None,
        token_kernel: Any = None,
    ) -> None:
        self._scales = checked_scales(spec, kv_scales or {})
        self._spec, self._device, self._notes = spec, device, notes
        self._lines = LogLines() if lines is None else lines
        self._uses_graphs = uses_graphs
        self._make_context = make_context
        self._keep_compiled = keep_compiled
        self._has_new_context = self._is_warming = False
        self._num_steps = 0
        self._wait_seconds = 0.0
        self._meanwhile: Callable[[], None] | None = None
        self._problem: str | None = None
        self._running = threading.Lock()
        with device.current(), contextlib.ExitStack() as undo:
            self._arena = DeviceArena(device)
            undo.callback(self._arena.close)
            self._stream = Stream(device.driver)
            undo.callback(self._stream.close)
            self._layers = LayerBuffers(self._arena, spec)
            self._num_tokens = 0
            self._fixed = {**self._fixed_bindings(), **self._layers.bindings()}
            self._buffers = StepBuffers(self._arena, spec, device.driver)
            undo.callback(self._buffers.close)
            self._sampler = (
                None
                if sampling_kernel is None
                else StepSampler(sampling_kernel, self._buffers, device.driver)
            )
            self._taker = (
                None
                if token_kernel is None
                else TokenTaker(token_kernel, self._buffers, device.driver)
            )
            self._running_steps: list[LaunchedStep] = []
            self._graphs = DecodeGraphs(self._stream)
            self._stream.synchronize()
            self._engine: Any = engine
            self._keep = keep
            # One block for all contexts: they run one after the other on one stream.
            self._scratch_bytes = max(1, int(engine.device_memory_size_v2))
            self._scratch = self._arena.allocate(self._scratch_bytes, "TensorRT's activations")
            self._context_profile = self._create_context(CONTEXT_PROFILE)
            # A graph is good only as long as its context stays as it was: one for each bucket.
            self._generation: dict[Bucket, BoundContext] = {}
            self._undo: contextlib.ExitStack | None = undo.pop_all()

    @property
    def name(self) -> str:
        """`tensorrt`."""
        return "tensorrt"

    @property
    def spec(self) -> EngineSpec:
        """The interface of the engine."""
        return self._spec

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report must say about this executor."""
        return self._notes

    @property
    def bucketed_shapes(self) -> bool:
        """True: a CUDA graph fits one (N, M)."""
        return True

    @property
    def samples_on_device(self) -> bool:
        """Whether the sampling kernel can read the engine's logits."""
        return self._sampler is not None

    def stats(self) -> ExecutorStats:
        """Counts since the executor was made."""
        return ExecutorStats(
            steps=self._num_steps,
            graph_captures=self._graphs.num_captures,
            graph_replays=self._graphs.num_replays,
            graph_fallbacks=self._graphs.num_fallbacks,
            input_copies=self._buffers.num_copies,
            table_copies=self._buffers.num_table_copies,
            output_copies=self._num_steps,
            allocations=self._arena.num_allocations,
            device_bytes=self._arena.num_bytes,
            contexts=1 + len(self._generation),
            wait_seconds=self._wait_seconds,
        )

    def step(self, inputs: StepInputs) -> npt.NDArray[Any]:
        """Append keys and values of T tokens to the pools, attend, and return logits.

        Returns:
            `[N, vocab_size]` or `[T, vocab_size]`; float16 or float32 (bfloat16 is upcast).

        Raises:
            ExecutionError: TensorRT or the device failed; where the device is lost, the
                executor says so from then on. Or it is closed, or another thread's step runs.
        """
        with self._alone():
            self._make_way()
            return self._buffers.logits(self._step(inputs, self._buffers.download))

    def step_tokens(self, inputs: StepInputs) -> npt.NDArray[np.int64]:
        """As `step`, for the greedy choices of the engine; the logits stay on the device.

        Returns:
            `[N]`; an id outside the vocabulary where a row has no largest logit.

        Raises:
            ExecutionError: as `step`.
            UnsupportedError: the engine was built without `--greedy-in-engine`.
        """
        require_next_tokens(self._spec)
        with self._alone():
            self._make_way()
            step = self._step(inputs, self._buffers.download_tokens)
            return self._buffers.staging.next_tokens(step)

    def step_sampled(
        self,
        inputs: StepInputs,
        rows: Sequence[int],
        specs: Sequence[Sampling],
        steps: Sequence[int],
        *,
        with_logprobs: bool = False,
    ) -> Sampled:
        """As `step`, for tokens that are drawn from the logits where they are.

        Where the kernel cannot read the logits, they are copied and drawn from in NumPy: the
        tokens are the same.

        Returns:
            Tokens of `rows`, an id outside the vocabulary where one has no largest logit, and
            their logprobs, zeros unless they are asked for.

        Raises:
            ExecutionError: as `step`.
            ConfigError: a row draws and has no seed.
        """
        sampler = self._sampler
        if sampler is None:
            return sampled_on_host(self, inputs, rows, specs, steps, with_logprobs=with_logprobs)
        with self._alone():
            self._make_way()
            sampler.prepare(inputs, rows, specs, steps, with_logprobs=with_logprobs)
            return sampler.result(self._step(inputs, sampler.download), rows)

    @property
    def gives_layer_outputs(self) -> bool:
        """Whether the engine was built with `--layer-outputs`."""
        return self._spec.layer_outputs

    def read_layer_outputs(self) -> list[npt.NDArray[Any]]:
        """Attention outputs of the last step, `[T, num_q_heads, value_head_dim]` by layer.

        Returns:
            float16, or float32 of bfloat16; T is 0 before the first step.

        Raises:
            UnsupportedError: the engine was built without `--layer-outputs`.
            ExecutionError: the device failed, another thread's step runs, or the executor is
                closed.
        """
        require_layer_outputs(self._spec)
        with self._alone():
            return self._layers.download(self._num_tokens, self._stream)

    @property
    def launcher(self) -> StepLauncher | None:
        """Itself, where steps can be handed over before the one before is collected."""
        return self if self._taker is not None else None

    @property
    def draws(self) -> bool:
        """Whether `launch` takes a `Draw`."""
        return self._sampler is not None

    def launch(self, inputs: StepInputs, draw: Draw | None) -> LaunchedStep:
        """Hand a step over to the device; `collect` waits for it.

        Raises:
            ExecutionError: as `step`.
            UnsupportedError: without a `draw`, the engine was built without `--greedy-in-engine`.
            ConfigError: a row draws and has no seed.
        """
        if draw is None:
            require_next_tokens(self._spec)
        with self._alone():
            step, staging = _shape(inputs), self._next_staging()
            download: Callable[[StepShape, Stream], None] = self._buffers.download_tokens
            if draw is not None and self._sampler is not None:
                rows = range(len(draw.specs))
                options = {"with_logprobs": draw.with_logprobs}
                self._sampler.prepare(inputs, rows, draw.specs, draw.steps, **options)
                download = self._sampler.download
            try:
                self._launch(inputs, step)
                download(step, self._stream)
                staging.done.record(self._stream)
            except BaseException as error:
                self._recover(error)
                raise
            has_logprobs = draw is not None and draw.with_logprobs
            self._running_steps.append(LaunchedStep(step, staging, has_logprobs))
            return self._running_steps[-1]

    def collect(self, step: LaunchedStep) -> Choices:
        """Wait for a step that was launched.

        Returns:
            Tokens `[N]`, an id outside the vocabulary where a row has no largest logit, and their
            logprobs, zeros unless they were asked for.

        Raises:
            ExecutionError: as `step`; or the step was collected before, or two were launched since.
        """
        with self._alone():
            if step not in self._running_steps:
                raise ExecutionError(
                    "a step is collected once, before the second one behind it is launched"
                )
            self._running_steps.remove(step)
            begin = time.perf_counter()
            try:
                step.staging.done.synchronize()
            except BaseException as error:
                self._recover(error)
                raise
            self._wait_seconds += time.perf_counter() - begin
            self._note_done(step.shape)
            tokens = step.staging.next_tokens(step.shape)
            if not step.has_logprobs:
                return tokens, np.zeros(len(tokens), np.float32)
            return tokens, step.staging.logprobs(step.shape)

    def _make_way(self) -> None:
        """Leave the page-locked memory of a launched step alone, before any of it is written."""
        if self._running_steps:
            self._next_staging()

    def _next_staging(self) -> Staging:
        """Page-locked memory that no running step uses."""
        staging = self._buffers.turn()
        for step in [each for each in self._running_steps if each.staging is staging]:
            self._running_steps.remove(step)
            staging.done.synchronize()
        return staging

    def during_next_step(self, work: Callable[[], None]) -> None:
        """Do some work once the next step is handed over to the device, before the wait for it."""
        self._meanwhile = work

    def copy_pages(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of whole pages, `(source, target)`, in every layer.

        Raises:
            ExecutionError: the device failed, or the executor is closed.
        """
        with self._alone():
            copy_pages(self._spec, self._pools, pages, self._stream)

    def poison_pages(self, page_ids: Sequence[int]) -> None:
        """Fill pages with bytes of 0xFF, NaN in every float type.

        Raises:
            ExecutionError: the device failed, or the executor is closed.
        """
        with self._alone():
            poison_pages(self._spec, self._pools, page_ids, self._stream)

    def warm_up(self) -> None:
        """Make what steps make when they are first needed: contexts, their kernels and graphs.

        Steps of padding: prefill of every size, and each (N, M) bucket of decode twice, eagerly
        and then from its graph, which takes device memory when it is launched first, with the
        kernels around it that choose tokens. A server calls it before its first request: then no
        request waits for a compiler, and memory that runs out runs out now.

        Raises:
            ExecutionError: as `step`.
        """
        # Kernels are kept as a whole: once for all contexts, not once for each.
        self._is_warming = True
        try:
            for inputs in prefill_steps(self._spec):
                self.step(inputs)
            for inputs in decode_steps(self._spec):
                self.step(inputs)
            for inputs in decode_steps(self._spec, takes_tokens=self._taker is not None):
                self._choose_once(inputs)
        finally:
            self._is_warming = False
        with self._alone():
            self._keep_new_kernels()

    def _choose_once(self, inputs: StepInputs) -> None:
        """Run a decode step with all kernels that may stand around it."""
        if self._sampler is None:
            self.step(inputs)
            return
        count = len(inputs.past_lens)
        self.step_sampled(inputs, range(count), [GREEDY] * count, [0] * count, with_logprobs=True)

    @property
    def kv_scales(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """Scales input name -> `[2, num_kv_heads]`; empty unless the pools are quantised."""
        return self._scales

    def read_pages(self, name: str, pages: Sequence[int]) -> npt.NDArray[Any]:
        """A copy of pages of a pool, `[len(pages), num_kv_heads, 128, head_dim]`.

        Raises:
            ExecutionError: the device failed, another thread's step runs, or the executor is
                closed.
        """
        with self._alone():
            return download_pages(self._stream, self._spec, name, self._pools[name], pages)

    def fill_pools(self, byte: int) -> None:
        """Set every byte of every pool.

        Raises:
            ExecutionError: the device failed, another thread's step runs, or the executor is
                closed.
        """
        with self._alone():
            for pair in layer_pools(self._spec):
                self._stream.fill(self._pools[pair.key_name], pair.num_bytes, byte=byte)
            self._stream.synchronize()

    def close(self) -> None:
        """Free pools, buffers, graphs and the engine; a second call does nothing."""
        if self._undo is None:
            return
        undo, self._undo = self._undo, None
        is_lost = self._problem is not None
        self._problem = self._problem or "the TensorRT executor is closed"
        # A lost device frees nothing, and the step that lost it has said why.
        quiet = contextlib.suppress(ExecutionError) if is_lost else contextlib.nullcontext()
        with quiet, self._device.current(), undo:
            undo.callback(self._drop_engine)
            undo.callback(self._graphs.close)
            with contextlib.suppress(ExecutionError):
                self._stream.synchronize()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """The device is current, and no other thread uses this executor."""
        if self._problem is not None:
            raise ExecutionError(f"{self._problem}; load the engine again")
        # Both would write the same page-locked blocks while copies still read them.
        if not self._running.acquire(blocking=False):
            raise ExecutionError(
                "another thread runs a step of this executor; load the engine once per thread"
            )
        try:
            with self._device.current():
                yield
        finally:
            self._running.release()

    def _step(self, inputs: StepInputs, download: Callable[[StepShape, Stream], None]) -> StepShape:
        step = _shape(inputs)
        try:
            self._launch(inputs, step)
            download(step, self._stream)
            self._work_meanwhile()
            begin = time.perf_counter()
            self._stream.synchronize()
            self._wait_seconds += time.perf_counter() - begin
        except BaseException as error:
            self._recover(error)
            raise
        self._note_done(step)
        return step

    def _note_done(self, step: StepShape) -> None:
        if not self._is_warming:
            self._keep_new_kernels()
        self._num_steps += 1
        self._num_tokens = step.num_tokens

    def _keep_new_kernels(self) -> None:
        """Keep what TensorRT compiled, once contexts that are new have run."""
        if self._has_new_context:
            self._has_new_context = False
            self._keep_compiled()

    def _work_meanwhile(self) -> None:
        work, self._meanwhile = self._meanwhile, None
        if work is not None:
            work()

    def _drop_engine(self) -> None:
        """Contexts before their engine, and both before the memory that they point to.

        Nothing of TensorRT is left: it calls CUDA's runtime, which in a thread without a current
        context would make one current.
        """
        self._generation.clear()
        del self._context_profile
        self._engine = None
        del self._make_context, self._keep_compiled
        self._keep = None

    def _launch(self, inputs: StepInputs, step: StepShape) -> None:
        self._buffers.upload(inputs, self._stream)
        if self._taker is not None and inputs.input_ids.min() < 0:
            self._taker.launch(step.num_tokens, self._stream)
        is_decode = step.num_tokens == step.num_seqs
        bucket = (step.num_seqs, step.table_width)
        bound = self._decode_context(bucket) if is_decode else self._context_profile
        bound.bind(self._buffers.bindings(step))

        def execute() -> None:
            with CALLBACK_ERRORS.watched() as watch:
                is_done = bound.execute(self._stream.handle)
            if not is_done or watch.first is not None:
                raise self._error(f"TensorRT failed in a step of {step}", watch.first)

        if is_decode and self._uses_graphs:
            self._graphs.run(bucket, bound.signature(), execute)
        else:
            execute()

    def _decode_context(self, bucket: Bucket) -> BoundContext:
        bound = self._generation.get(bucket)
        if bound is None:
            bound = self._generation[bucket] = self._create_context(GENERATION_PROFILE)
        return bound

    def _recover(self, error: BaseException) -> None:
        """After a failed step: an idle stream, or the end of this executor."""
        self._buffers.forget_table()
        self._meanwhile = None
        try:
            self._stream.synchronize()
        except ExecutionError as lost:
            self._problem = f"the device was lost in a step ({error}; then {lost})"

    def _fixed_bindings(self) -> dict[str, Binding]:
        """Pools, inputs and outputs at one address, and scales."""
        fixed: dict[str, Binding] = {}
        dims = {tensor.name: tensor.dims for tensor in self._spec.tensors()}
        self._pools = allocate_pools(self._arena, self._spec, self._stream)
        for name, address in self._pools.items():
            fixed[name] = (address, tuple(int(dim) for dim in dims[name]))
            fixed[pool_output_name(name)] = (address, None)
        for name, array in self._scales.items():
            address = self._arena.allocate(array.nbytes, f"`{name}`")
            host = self._arena.allocate_pinned(array.nbytes)
            host[:] = array.reshape(-1).view(np.uint8)
            self._stream.upload(address, host.ctypes.data, array.nbytes)
            fixed[name] = (address, array.shape)
        return fixed

    def _create_context(self, profile: int) -> BoundContext:
        with CALLBACK_ERRORS.watched() as watch:
            context = self._make_context(self._engine, profile)
        if context is None:
            raise self._error(
                f"TensorRT made no execution context, {self._device.free_bytes():,} bytes of "
                "device memory are free",
                watch.first,
            )
        # A plugin must not raise while it is attached: the context is there all the same.
        if watch.first is not None:
            raise self._error("a plugin of an execution context is not ready", watch.first)
        # The first context of an engine has its first profile already.
        if context.active_optimization_profile != profile:
            if not context.set_optimization_profile_async(profile, self._stream.handle):
                raise self._error(f"TensorRT refused profile {profile}")
            self._stream.synchronize()
        context.set_device_memory(self._scratch, self._scratch_bytes)
        self._has_new_context = True
        return BoundContext(context, self._fixed)

    def _error(self, problem: str, cause: BaseException | None = None) -> ExecutionError:
        return tensorrt_error(ExecutionError, problem, log=self._lines.tail(), cause=cause)


def _shape(inputs: StepInputs) -> StepShape:
    num_seqs, width = inputs.page_table.shape
    return StepShape(num_tokens=len(inputs.input_ids), num_seqs=num_seqs, table_width=width)
