"""Stop strings, however the text is cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paged_trt.scripts.server.stops import StopStrings

# Few letters make many beginnings of stop strings.
TEXTS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """What comes before the stop string that is complete first, of those the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(text=TEXTS, stops=STOPS, data=st.data())
def test_pieces_make_no_difference(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stream = StopStrings(stops)
    shown, is_stopped = "", False
    for index, piece in enumerate(pieces):
        certain, is_stopped = stream.push(piece, is_last=index == len(pieces) - 1)
        shown += certain
        if is_stopped:
            break
    assert (shown, is_stopped) == expected(text, stops)


@given(text=TEXTS, stops=STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    shown, is_stopped = stream.push(text)
    held = text[len(shown) :]
    if not is_stopped and held:
        assert any(stop.startswith(held) for stop in stops)
