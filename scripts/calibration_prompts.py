"""Prompts for calibration: a small built-in set, or the lines of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paged_trt.plugins.errors import ConfigError

MAX_BYTES: Final = 2**24
BUILT_IN: Final = (
    "The capital of France is a city on the river Seine, known for",
    "To bake bread you need flour, water, salt and yeast. First, mix",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Q: A train leaves at 9:40 and arrives at 12:15. How long did the journey take?\nA:",
    "Dear Ms. Alvarez, thank you for your letter of 3 March about the delayed delivery.",
    "Die Hauptstadt von Deutschland ist Berlin, und die größte Stadt am Rhein ist",
    "| country | capital |\n|---|---|\n| Japan | Tokyo |\n| Peru |",
    "Once upon a time, in a village at the edge of a dark forest, there lived a clockmaker who",
    "The derivative of x^3 - 4x + 7 with respect to x is",
    '{"name": "sensor-17", "unit": "celsius", "values": [21.4, 21.6, 21.5], "status":',
    "Water boils at 100 degrees Celsius at sea level; on a mountain it boils at a lower "
    "temperature because",
    "En un lugar de la Mancha, de cuyo nombre no quiero acordarme, no ha mucho tiempo que",
    "SELECT customer_id, SUM(amount) AS total FROM orders WHERE order_date >= '2024-01-01'",
    "The patient reports mild headaches in the morning, no fever, and a dry cough for two weeks.",
    "What is the difference between a virus and a bacterium? Explain it to a ten-year-old.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597,",
)
"""Text of several kinds, our own or older than copyright."""


def read_prompt_file(path: Path) -> list[str]:
    """Prompts of a text file, one a line; empty lines do not count.

    Raises:
        ConfigError: there is no such file, it is no UTF-8 text, too large, or empty.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file of prompts at `{path}`; pass one prompt a line")
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"`{path}` has over {MAX_BYTES} bytes; a few hundred prompts are enough")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"`{path}` is no UTF-8 text ({error}); encode it as UTF-8") from error
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"`{path}` holds no prompt; write one a line")
    return prompts
