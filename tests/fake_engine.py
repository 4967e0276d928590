"""A stand-in for a TensorRT engine: its contexts run the reference executor on the same memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from fake_driver import FakeDriver

from paged_trt.plugins.tensors import EngineSpec, Role
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.reference_executor import ReferenceExecutor


class FakeEngine:
    """Makes contexts.

    Args:
        driver: whose memory the addresses mean.
        reference: runs the steps.

    Attributes:
        failing: executions that are going to fail.
        unbindable: tensors whose dims are refused.
    """

    def __init__(self, driver: FakeDriver, reference: ReferenceExecutor) -> None:
        self.driver, self.reference = driver, reference
        self.contexts: list[FakeContext] = []
        self.failing = 0
        self.uncapturable = False
        self.unbindable: set[str] = set()
        self.max_contexts = 100
        self.device_memory_size_v2 = 1000

    def create_execution_context(self) -> FakeContext | None:
        if len(self.contexts) >= self.max_contexts:
            return None
        # As in TensorRT: the first context has profile 0, others have none.
        self.contexts.append(FakeContext(self, -1 if self.contexts else 0))
        return self.contexts[-1]


class FakeContext:
    def __init__(self, engine: FakeEngine, profile: int) -> None:
        self.engine = engine
        self.active_optimization_profile = profile
        self.dims: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.executions = 0
        self.set_calls = 0
        self.scratch = 0
        self.on_execute: Callable[[], None] = lambda: None

    def set_device_memory(self, address: int, size: int) -> None:
        assert self.engine.driver.blocks[address]
        assert size == self.engine.device_memory_size_v2
        self.scratch = address

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.active_optimization_profile = profile
        return True

    def set_input_shape(self, name: str, dims: tuple[int, ...]) -> bool:
        self.set_calls += 1
        self.dims[name] = tuple(dims)
        return name not in self.engine.unbindable

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % 256 == 0
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        driver = self.engine.driver
        self.on_execute()
        assert driver.pushed == 1
        assert self.scratch
        if self.engine.failing:
            self.engine.failing -= 1
            return False
        if self.engine.uncapturable and driver.recording is not None:
            return False
        self._check_pools()
        dims, addresses = dict(self.dims), dict(self.addresses)
        driver.perform(lambda: self._run(dims, addresses))
        self.executions += driver.recording is None
        return True

    def _check_pools(self) -> None:
        for tensor in self.spec.tensors():
            assert tensor.name in self.addresses
            if tensor.role is Role.POOL_OUTPUT:
                assert tensor.alias_of is not None
                assert self.addresses[tensor.name] == self.addresses[tensor.alias_of]
            if tensor.role in (Role.POOL_INPUT, Role.SCALES):
                assert self.dims[tensor.name] == tensor.dims

    @property
    def spec(self) -> EngineSpec:
        return self.engine.reference.spec

    def _run(self, dims: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        read: dict[str, Any] = {}
        for tensor in self.spec.tensors():
            if tensor.role is Role.STEP_INPUT:
                read[tensor.name] = read_memory(
                    addresses[tensor.name], dims[tensor.name], np.dtype(tensor.dtype.numpy)
                )
        ids = read["input_ids"][0]
        tokens, seqs = len(ids), len(read["past_lens"])
        assert (tokens == seqs) == (self.active_optimization_profile == 1)
        positions = read.get("position_ids", ids[None] * 0)[0]
        results = self.engine.reference._run(
            StepInputs(
                input_ids=ids,
                position_ids=positions,
                page_table=read["page_table"],
                query_start_offsets=read["query_start_offsets"],
                past_lens=read["past_lens"],
            )
        )
        layers = [each for each in self.spec.tensors() if each.role is Role.LAYER_OUTPUT]
        # The reference keeps them for every engine; this one may have no such outputs.
        for tensor, array in zip(
            layers, self.engine.reference.read_layer_outputs(), strict=bool(layers)
        ):
            results[tensor.name] = array
        for tensor in self.spec.tensors():
            if tensor.role in (Role.RESULT, Role.LAYER_OUTPUT):
                array = results[tensor.name].astype(tensor.dtype.numpy)
                ctypes.memmove(addresses[tensor.name], array.ctypes.data, array.nbytes)
        for tensor in self.spec.pools():
            pool = self.engine.reference.pool(tensor.name)
            ctypes.memmove(addresses[tensor.name], pool.ctypes.data, pool.nbytes)


def read_memory(address: int, dims: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    count = int(np.prod(dims))
    raw = ctypes.string_at(address, count * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(dims).copy()
