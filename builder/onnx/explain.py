"""What a model's attention is, node by node, and what is in the way of each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import onnx_ir as ir

from paged_trt.builder.onnx.dialects import DIALECTS, Match, match_layer, unsupported
from paged_trt.builder.onnx.facts import Dialect, ModelFacts
from paged_trt.builder.onnx.graph import node_name
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.probe import Probe
from paged_trt.builder.onnx.survey import make_probe, survey
from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.errors import OnnxRewriteError
from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is in the way.

    Attributes:
        where: name of the node or value; of the model where none is to blame.
        reason: what it does that a paged step cannot.
        remedy: what to export instead.
    """

    where: str
    reason: str
    remedy: str

    @classmethod
    def of(cls, error: OnnxRewriteError) -> Problem:
        """The problem that `error` tells of."""
        return cls(where=error.node, reason=error.reason, remedy=error.remedy)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One attention node.

    Attributes:
        name: of the node.
        operator: its domain and type.
        attention: what it becomes; None where it is refused.
        problem: why it is refused; None where it is not.
    """

    name: str
    operator: str
    attention: AttentionSpec | None
    problem: Problem | None

    @property
    def becomes(self) -> str | None:
        """Operator that takes its place."""
        return None if self.attention is None else f"{OP_DOMAIN}::{OP_TYPE}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A model and its attention nodes.

    Attributes:
        model: file name.
        producer: what wrote it, as it says itself.
        opset: version of the standard opset.
        nodes: attention nodes in graph order.
        problem: what is in the way of the model as a whole; None where every node and the
            model can be rewritten.
        facts: the survey; None where there is a problem.
    """

    model: str
    producer: str
    opset: int
    nodes: tuple[NodeReport, ...]
    problem: Problem | None
    facts: ModelFacts | None

    @property
    def can_be_rewritten(self) -> bool:
        """Whether `paged-trt build` takes the model."""
        return self.facts is not None

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Bytes of keys and values of one token in all layers, in the model's own type."""
        if self.facts is None:
            return None
        elements = sum(layer.kv_elements for layer in self.facts.layers)
        return elements * self.facts.activation_dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types."""
        facts = self.facts
        return {
            "model": self.model,
            "producer": self.producer,
            "opset": self.opset,
            "can_be_rewritten": self.can_be_rewritten,
            "problem": None if self.problem is None else dataclasses.asdict(self.problem),
            "nodes": [_node_json(node) for node in self.nodes],
            "dialect": None if facts is None else facts.dialect.value,
            "activation_dtype": None if facts is None else facts.activation_dtype.value,
            "vocab_size": None if facts is None else facts.vocab_size,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "max_positions": _max_positions(facts),
        }


def _node_json(node: NodeReport) -> dict[str, Any]:
    attention = None
    if node.attention is not None:
        attention = {**dataclasses.asdict(node.attention), "rope": node.attention.rope.name.lower()}
    return {
        "name": node.name,
        "operator": node.operator,
        "becomes": node.becomes,
        "attention": attention,
        "problem": None if node.problem is None else dataclasses.asdict(node.problem),
    }


def _max_positions(facts: ModelFacts | None) -> int | None:
    """Positions that all tables and proofs of the model reach; None where nothing bounds them."""
    if facts is None:
        return None
    return min((limit.positions for limit in facts.position_limits), default=None)


def explain(path: Path) -> ModelReport:
    """Report on the model at `path`; nothing is written.

    Raises:
        ConfigError: there is no such file.
        OnnxRewriteError: the file is no model that can be read.
        UnsupportedError: a mask has to be proved and onnxruntime is not installed.
    """
    model = load_model(path)
    probe = make_probe(model)
    nodes = tuple(
        _report(node, dialect, match, probe) for node, dialect, match in _attention_nodes(model)
    )
    facts: ModelFacts | None = None
    problem: Problem | None = None
    try:
        facts = survey(model)
    except OnnxRewriteError as error:
        # As `build` says it, which may be about the model and not about its first node.
        problem = Problem.of(error)
    producer = " ".join(filter(None, (model.producer_name, model.producer_version)))
    return ModelReport(
        model=Path(path).name,
        producer=producer or "unknown",
        opset=model.opset_imports.get("", 0),
        nodes=nodes,
        problem=problem,
        facts=facts,
    )


def _attention_nodes(model: ir.Model) -> list[tuple[ir.Node, Dialect | None, Match | None]]:
    found: list[tuple[ir.Node, Dialect | None, Match | None]] = []
    for node in model.graph:
        dialect = next((each for each in DIALECTS if each[1](node)), None)
        if dialect is not None:
            found.append((node, dialect[0], dialect[2]))
        elif unsupported(node) is not None:
            found.append((node, None, None))
    return found


def _report(
    node: ir.Node, dialect: Dialect | None, match: Match | None, probe: Probe
) -> NodeReport:
    operator = f"{node.domain or 'ai.onnx'}::{node.op_type}" if dialect is None else dialect.value
    attention, error = None, unsupported(node)
    if match is not None:
        try:
            attention = match_layer(node, match, probe)[0].attention
        except OnnxRewriteError as caught:
            error = caught
    return NodeReport(
        name=node_name(node),
        operator=operator,
        attention=attention,
        problem=None if error is None else Problem.of(error),
    )
