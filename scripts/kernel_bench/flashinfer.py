"""FlashInfer, and TensorRT-LLM's XQA through it."""

from __future__ import annotations

from typing import Any, Final

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.kv import TOKENS_PER_PAGE
from paged_trt.scripts.kernel_bench.cells import Family
from paged_trt.scripts.kernel_bench.peers import Peer, PeerCalls, PeerData, PeerError, optional

LAYOUT: Final = "NHD"
WORKSPACE_BYTES: Final = 768 * 2**20
CUDA_CORE_BYTES: Final = 70_000_000
"""The kernel on CUDA cores is the fastest on short caches only."""


_WORKSPACES: Final[dict[str, Any]] = {}


def _workspace(torch: Any, user: str) -> Any:
    """A block for all cells of one library: XQA's must be zero at first and it leaves it so."""
    if user not in _WORKSPACES:
        _WORKSPACES[user] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    return _WORKSPACES[user]


class FlashInferDecode:
    """Decode with keys in registers (CUDA cores) or with the FlashAttention-2 template.

    Args:
        version: of the package.
        uses_tensor_cores: which of the two.
    """

    families = frozenset({Family.DECODE})

    def __init__(self, version: str, *, uses_tensor_cores: bool) -> None:
        self.version = version
        self.name = "FlashInfer TC" if uses_tensor_cores else "FlashInfer CUDA-core"
        self._tensor_cores = uses_tensor_cores

    def prepare(self, data: PeerData) -> PeerCalls:
        """One plan, and one call per page table."""
        module, cell, torch = optional("flashinfer.decode"), data.cell, data.torch
        if not self._tensor_cores and (
            cell.bytes > CUDA_CORE_BYTES or cell.kv is not DType.BFLOAT16
        ):
            raise PeerError("not the kernel that FlashInfer takes for so many bytes")
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(torch, "FlashInfer"),
            LAYOUT,
            use_tensor_cores=self._tensor_cores,
            backend="fa2" if self._tensor_cores else "auto",
        )
        offsets, last, ids = data.page_indices()
        wrapper.plan(
            offsets,
            ids[0],
            last,
            *cell.heads,
            cell.head_dim,
            TOKENS_PER_PAGE,
            window_left=data.window_left,
            q_data_type=torch.bfloat16,
            kv_data_type=data.keys.dtype,
        )

        def run(pages: Any) -> None:
            # A plan holds for these lengths; which pages they are is no part of it.
            wrapper._paged_kv_indices_buf = pages
            wrapper.run(data.query, (data.keys, data.values), out=data.out)

        return PeerCalls(calls=[_bound(run, pages) for pages in ids], output=lambda: data.out)


class FlashInferPrefill:
    """Prefill with the FlashAttention-2 or FlashAttention-3 template.

    Args:
        version: of the package.
        backend: `fa2` or `fa3`.
    """

    families = frozenset({Family.PREFILL})

    def __init__(self, version: str, backend: str) -> None:
        self.version, self._backend = version, backend
        self.name = f"FlashInfer {backend.upper()}"

    def prepare(self, data: PeerData) -> PeerCalls:
        """One plan, and one call per page table."""
        module, cell, torch = optional("flashinfer.prefill"), data.cell, data.torch
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(
            _workspace(torch, "FlashInfer"), LAYOUT, backend=self._backend
        )
        offsets, last, ids = data.page_indices()
        queries = torch.tensor([0, *cell.sizes.query_lens], dtype=torch.int32).cumsum(0)
        wrapper.plan(
            queries.int(),
            offsets,
            ids[0],
            last,
            *cell.heads,
            cell.head_dim,
            TOKENS_PER_PAGE,
            causal=True,
            window_left=data.window_left,
            q_data_type=torch.bfloat16,
            kv_data_type=data.keys.dtype,
        )

        def run(pages: Any) -> None:
            wrapper._paged_kv_indices_buf = pages
            wrapper.run(data.query, (data.keys, data.values), out=data.out)

        return PeerCalls(calls=[_bound(run, pages) for pages in ids], output=lambda: data.out)


class Xqa:
    """TensorRT-LLM's decode kernel, as FlashInfer builds it.

    Args:
        version: of FlashInfer.
    """

    name = "XQA"
    families = frozenset({Family.DECODE})

    def __init__(self, version: str) -> None:
        self.version = f"of FlashInfer {version}"

    def prepare(self, data: PeerData) -> PeerCalls:
        """One call per page table."""
        module, cell, torch = optional("flashinfer.decode"), data.cell, data.torch
        lengths = data.lengths.view(torch.uint32)
        tables = [table.contiguous() for table in data.tables]

        def run(table: Any) -> None:
            module.xqa_batch_decode_with_kv_cache(
                data.query,
                (data.keys, data.values),
                _workspace(torch, "XQA"),
                table,
                lengths,
                data.max_keys,
                bmm1_scale=cell.attention.softmax_scale,
                bmm2_scale=1.0,
                window_left=data.window_left,
                out=data.out,
                kv_layout=LAYOUT,
            )

        return PeerCalls(calls=[_bound(run, table) for table in tables], output=lambda: data.out)


class FlashInferAppend:
    """FlashInfer's append: which sequence and place each token has is computed beforehand.

    Args:
        version: of the package.
    """

    name = "FlashInfer"
    families = frozenset({Family.APPEND})

    def __init__(self, version: str) -> None:
        self.version = version

    def prepare(self, data: PeerData) -> PeerCalls:
        """One call per page table."""
        module, cell, torch = optional("flashinfer.page"), data.cell, data.torch
        if cell.rope or cell.kv is not DType.BFLOAT16:
            raise PeerError("its append neither rotates nor quantises")
        tokens = sum(cell.sizes.query_lens)
        key, value = (
            torch.randn(tokens, cell.heads[1], cell.head_dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        pairs = list(zip(cell.sizes.query_lens, cell.sizes.kv_lens, strict=True))
        places = torch.cat([torch.arange(keys - new, keys) for new, keys in pairs]).int().cuda()
        owners = torch.repeat_interleave(
            data.ints(range(len(pairs))), data.ints(cell.sizes.query_lens)
        )
        offsets, last, ids = data.page_indices()
        offsets, last = offsets.cuda(), last.cuda()

        def run(pages: Any) -> None:
            module.append_paged_kv_cache(
                key,
                value,
                owners.int(),
                places,
                (data.keys, data.values),
                pages,
                offsets,
                last,
                LAYOUT,
            )

        return PeerCalls(calls=[_bound(run, pages) for pages in ids], output=lambda: None)


def flashinfer_peers() -> list[Peer]:
    """What of FlashInfer can be imported."""
    package = optional("flashinfer")
    if package is None or optional("flashinfer.decode") is None:
        return []
    version = str(package.__version__)
    peers: list[Peer] = [
        FlashInferDecode(version, uses_tensor_cores=True),
        FlashInferDecode(version, uses_tensor_cores=False),
        FlashInferPrefill(version, "fa2"),
        FlashInferPrefill(version, "fa3"),
        FlashInferAppend(version),
    ]
    if hasattr(optional("flashinfer.decode"), "xqa_batch_decode_with_kv_cache"):
        peers.append(Xqa(version))
    return peers


def _bound(run: Any, argument: Any) -> Any:
    return lambda: run(argument)
