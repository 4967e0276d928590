from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_trt.plugins.errors import ConfigError, ManifestError, UnsupportedError
from paged_trt.runtime.tokenizer import TextStream, Tokenizer
from paged_trt.scripts.example_models.tokenizer_files import byte_alphabet, write_tokenizer

TEXT = "Grüße, 世界! 👩‍🚀 \ufffd ok"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokens = [*byte_alphabet(), "<s>", "</s>"]
    write_tokenizer(
        tmp_path / "tokenizer.json", tokens, [], special=["<s>", "</s>"], individual_digits=False
    )
    return tmp_path


def write(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_text_survives(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode([*tokenizer.encode("a"), 257]) == "a"


def test_a_stream_emits_whole_characters_and_the_same_text(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode("a世界b👩")]
    assert [piece for piece in pieces if piece] == ["a", "世", "界", "b", "👩"]
    assert stream.finish() == ""


def test_a_stream_gives_up_on_half_a_character_at_the_end_only(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    stream = tokenizer.stream()
    ids = tokenizer.encode("a世")[:-1]
    assert [stream.push(token) for token in ids] == ["a", "", ""]
    assert set(stream.finish()) == {"\ufffd"}
    assert stream.finish() == ""


def test_a_true_replacement_character_survives(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, tokenizer.encode(TEXT))) + stream.finish() == TEXT


def test_a_stream_keeps_spaces_that_depend_on_the_token_before(tmp_path: Path) -> None:
    # As in Llama's sentencepiece: the first word of a text loses its space, the others do not.
    vocabulary = {"\u2581one": 0, "\u2581two": 1, "<unk>": 2}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")  # noqa: S106
    words = tokenizers.Tokenizer(model)
    words.decoder = tokenizers.decoders.Metaspace()
    words.save(str(tmp_path / "tokenizer.json"))
    stream = Tokenizer(tmp_path).stream()
    assert [stream.push(token) for token in (0, 1, 0)] == ["one", " two", " one"]


def test_a_stream_is_not_confused_by_special_tokens(folder: Path) -> None:
    stream = Tokenizer(folder).stream()
    ids = [256, *Tokenizer(folder).encode("hi"), 257]
    assert [stream.push(token) for token in ids] == ["", "h", "i", ""]


class Counting(Tokenizer):
    """Counts the tokens that it decodes."""

    num_decoded = 0

    def decode(self, token_ids: Iterable[int]) -> str:
        ids = list(token_ids)
        self.num_decoded += len(ids)
        return super().decode(ids)


@pytest.mark.parametrize("token", [0xFF, 0xE4, 0x80, 257])
def test_what_never_becomes_a_character_costs_no_more_than_other_text(
    folder: Path, token: int
) -> None:
    """Broken bytes, characters that only begin, bytes without a beginning, and no text at all."""
    tokenizer = Counting(folder)
    ids = [*tokenizer.encode("世"), *[token] * 3000, *tokenizer.encode("界 b")]
    stream = tokenizer.stream()
    pieces = [stream.push(each) for each in ids]
    assert "".join(pieces) + stream.finish() == Tokenizer(folder).decode(ids)
    # Twice the newest and the last emitted ones for each token.
    assert tokenizer.num_decoded < 64 * len(ids)
    # What is certain comes while the rest is still on its way.
    longest = max(len(list(group)) for empty, group in itertools.groupby(pieces, bool) if not empty)
    assert longest <= (3000 if token == 257 else 16) + 2


class Bytes:
    """Tokens of arbitrary bytes, for a decoder that joins them."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.tokens[each] for each in ids).decode(errors="replace")


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    text=st.text(alphabet="aé世👩\ufffd", max_size=40),
    noise=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(b"\xff\xe4\xb8\x96\xf0\x9f"))),
    cuts=st.sets(st.integers(1, 300)),
)
def test_pieces_are_the_text_wherever_tokens_begin(
    text: str, noise: list[tuple[int, int]], cuts: set[int]
) -> None:
    data = bytearray(text.encode())
    for place, byte in noise:
        data.insert(min(place, len(data)), byte)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    tokens = [bytes(data[start:end]) for start, end in itertools.pairwise(edges) if end > start]
    stream = TextStream(Bytes(tokens))  # type: ignore[arg-type]
    pieces = [*map(stream.push, range(len(tokens))), stream.finish()]
    assert "".join(pieces) == data.decode(errors="replace")


@pytest.mark.parametrize("character", "é世👩")
def test_a_character_after_any_number_of_broken_bytes(character: str) -> None:
    """What is emitted before its end is never a part of it."""
    for count in range(30):
        data = b"\xff" * count + character.encode() + b"\xff" * 20
        stream = TextStream(Bytes([bytes([each]) for each in data]))  # type: ignore[arg-type]
        pieces = [*map(stream.push, range(len(data))), stream.finish()]
        assert "".join(pieces) == data.decode(errors="replace")


def test_bytes_of_sentencepiece_are_characters_again(tmp_path: Path) -> None:
    """As in Llama: characters that the vocabulary lacks are one token for each byte."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    model = tokenizers.models.WordLevel(vocabulary | {"\u2581a": 256}, unk_token="<0x00>")  # noqa: S106
    words = tokenizers.Tokenizer(model)
    words.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace()]
    )
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Counting(tmp_path)
    stream = tokenizer.stream()
    text = "世界👩" * 300
    pieces = [stream.push(token) for token in (256, *text.encode(), *[0xFF] * 3000, 256)]
    assert "".join(pieces[: len(text.encode()) + 1]) == "a" + text
    assert "".join(pieces).endswith("\ufffd a")
    assert tokenizer.num_decoded < 64 * len(pieces)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, {257}),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>"}}}, {257}),
        (
            {"config.json": {"eos_token_id": 7}, "tokenizer_config.json": {"eos_token": "</s>"}},
            {7},
        ),
        (
            {
                "generation_config.json": {"eos_token_id": [1, 2]},
                "config.json": {"eos_token_id": 7},
            },
            {1, 2},
        ),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": None}}, set()),
    ],
)
def test_the_first_file_that_names_an_end_token_decides(
    folder: Path, files: dict[str, dict[str, Any]], expected: set[int]
) -> None:
    for name, content in files.items():
        write(folder, name, **content)
    assert Tokenizer(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("config.json", {"eos_token_id": "2"}, r"config.json: `eos_token_id` is '2'"),
        ("config.json", {"eos_token_id": [True]}, r"`eos_token_id` is \[True\]"),
        ("tokenizer_config.json", {"eos_token": "<end>"}, "`eos_token` is '<end>'"),
        ("tokenizer_config.json", {"eos_token": 5}, "`eos_token` is 5"),
    ],
)
def test_an_end_token_that_is_none_is_a_named_error(
    folder: Path, name: str, entry: dict[str, Any], message: str
) -> None:
    write(folder, name, **entry)
    with pytest.raises(ManifestError, match=message):
        _ = Tokenizer(folder).eos_token_ids


def test_missing_and_broken_files_are_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ManifestError, match=r"tokenizer_config.json must hold a JSON object"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").write_bytes(b"\xff")
    with pytest.raises(ManifestError, match=r"cannot read .*tokenizer_config.json"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ManifestError, match=r"tokenizer_config.json is no JSON"):
        Tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ManifestError, match=r"tokenizer.json is no tokenizer"):
        Tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ManifestError, match=r"tokenizer.json does not exist; .*--tokenizer PATH"):
        Tokenizer(folder)


@pytest.mark.parametrize("where", ["config", "named", "file"])
def test_a_chat_is_rendered(folder: Path, where: str) -> None:
    if where == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    else:
        named = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
        template = TEMPLATE if where == "config" else named
        write(folder, "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_template is not None
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt == "<user>hi</s><assistant>"
    assert tokenizer.encode(prompt, add_special_tokens=False).count(257) == 1


def test_no_chat_template_is_a_named_error(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_template is None
    with pytest.raises(ConfigError, match="has no chat template; pass a plain prompt"):
        tokenizer.chat_prompt([])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for x in range(10000000000) %}{% endfor %}",
        "{% if %}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_cannot_do_harm(folder: Path, template: str) -> None:
    write(folder, "tokenizer_config.json", chat_template=template)
    with pytest.raises(ConfigError, match="the chat template failed"):
        Tokenizer(folder).chat_prompt([{"role": "user", "content": "hi"}])


def test_jinja_is_optional(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "tokenizer_config.json", chat_template=TEMPLATE)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UnsupportedError, match=r"pip install .paged-trt\[demo\]"):
        Tokenizer(folder).chat_prompt([{"role": "user", "content": "hi"}])
