"""cuDNN's attention from pages, through its Python front end."""

from __future__ import annotations

from typing import Any, Final

from paged_trt.plugins.attention import FULL_WINDOW
from paged_trt.plugins.dtypes import DType
from paged_trt.scripts.kernel_bench.cells import Family
from paged_trt.scripts.kernel_bench.peers import Peer, PeerCalls, PeerData, PeerError, optional

MOST_ELEMENTS: Final = 2**31
"""It takes no pool of more: the pages that a cell uses come first in ours."""


class Cudnn:
    """One graph per cell.

    Args:
        version: of front end and back end.
        stream: handle of the stream that is timed.
    """

    name = "cuDNN"
    families = frozenset({Family.DECODE, Family.PREFILL})

    def __init__(self, version: str, stream: int) -> None:
        self.version = version
        self._stream = stream
        self._handle: Any = None

    def prepare(self, data: PeerData) -> PeerCalls:
        """Build a graph, and one call per page table."""
        cell, torch = data.cell, data.torch
        if cell.kv is not DType.BFLOAT16 or cell.window != FULL_WINDOW:
            raise PeerError("float8 pools and windows are not measured")
        if len(set(cell.sizes.query_lens)) > 1:
            raise PeerError("it packs no ragged queries with pages")
        used = int(data.tables.max()) + 1
        keys, values = (pool[:used].permute(0, 2, 1, 3) for pool in (data.keys, data.values))
        if keys.numel() >= MOST_ELEMENTS:
            raise PeerError(f"a pool of {keys.numel()} elements is too large for it")
        new = cell.sizes.query_lens[0]
        query, out = (
            each.view(data.batch, new, *each.shape[1:]).permute(0, 2, 1, 3)
            for each in (data.query, data.out)
        )
        lengths = [
            data.ints(values_).view(-1, 1, 1, 1)
            for values_ in (cell.sizes.query_lens, cell.sizes.kv_lens)
        ]
        tables = [table.reshape(data.batch, 1, -1, 1).contiguous() for table in data.tables]
        graph, places = self._build(data, query, keys, values, tables[0], lengths, out)
        workspace = torch.empty(
            max(graph.get_workspace_size(), 16), dtype=torch.uint8, device="cuda"
        )

        def run(table: Any) -> None:
            tensors = (query, keys, values, out, *lengths, table, table)
            graph.execute(dict(zip(places, tensors, strict=True)), workspace, handle=self._handle)

        return PeerCalls(calls=[_bound(run, table) for table in tables], output=lambda: data.out)

    def _build(
        self,
        data: PeerData,
        query: Any,
        keys: Any,
        values: Any,
        table: Any,
        lengths: list[Any],
        out: Any,
    ) -> tuple[Any, list[Any]]:
        module, cell = optional("cudnn"), data.cell
        if self._handle is None:
            self._handle = module.create_handle()
            module.set_stream(handle=self._handle, stream=self._stream)
        graph = module.pygraph(
            io_data_type=module.data_type.BFLOAT16,
            intermediate_data_type=module.data_type.FLOAT,
            compute_data_type=module.data_type.FLOAT,
            handle=self._handle,
        )
        q, k, v, new, all_keys, k_table, v_table = (
            graph.tensor_like(each) for each in (query, keys, values, *lengths, table, table)
        )
        mask = {}
        if cell.family is Family.PREFILL:
            is_whole = query.shape[2] == data.max_keys
            mask = {"use_causal_mask" if is_whole else "use_causal_mask_bottom_right": True}
        output, _ = graph.sdpa(
            name="attention",
            q=q,
            k=k,
            v=v,
            generate_stats=False,
            attn_scale=cell.attention.softmax_scale,
            use_padding_mask=True,
            seq_len_q=new,
            seq_len_kv=all_keys,
            paged_attention_k_table=k_table,
            paged_attention_v_table=v_table,
            paged_attention_max_seq_len_kv=data.max_keys,
            **mask,
        )
        output.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([module.heur_mode.A, module.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph, [q, k, v, output, new, all_keys, k_table, v_table]


def cudnn_peers(stream: int) -> list[Peer]:
    """cuDNN, where its front end can be imported."""
    module = optional("cudnn")
    if module is None:
        return []
    return [Cudnn(f"front end {module.__version__}, {module.backend_version()}", stream)]


def _bound(run: Any, argument: Any) -> Any:
    return lambda: run(argument)
