"""A child: renders a page in Qt WebEngine, Chromium from PyPI, and prints the text that it shows.

    qt_page.py PAGE PICTURE COLOURS SECONDS

Qt does not say when everything is painted. So the picture is taken again and again until it has as
many pixels as COLOURS asks for (JSON: [[red, green, blue, count], ...] of 0 to 1), or SECONDS are
over: on a slow machine it takes longer and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

os.environ |= {
    "QT_QPA_PLATFORM": "offscreen",
    "QTWEBENGINE_DISABLE_SANDBOX": "1",
    # No name resolves: whatever the page loaded from elsewhere would be missing.
    "QTWEBENGINE_CHROMIUM_FLAGS": "--disable-gpu --disable-dev-shm-usage "
    '--host-resolver-rules="MAP * ~NOTFOUND"',
}

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtGui import QImage
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

SIZE = (1100, 1600)
AGAIN_MS = 100


def is_painted(image: QImage, colours: list[list[float]]) -> bool:
    plain = image.convertToFormat(QImage.Format.Format_RGBA8888)
    bits = plain.constBits()
    assert bits is not None
    bits.setsize(plain.sizeInBytes())
    pixels = np.frombuffer(bits, np.uint8).reshape(plain.height(), plain.width(), 4)[..., :3] / 255
    return all(
        (np.abs(pixels - colour).max(axis=-1) < 0.05).sum() > count for *colour, count in colours
    )


def main() -> int:
    page, picture = map(Path, sys.argv[1:3])
    colours, seconds = json.loads(sys.argv[3]), float(sys.argv[4])
    application = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.resize(*SIZE)
    end = time.monotonic() + seconds

    def shoot(text: str) -> None:
        image = view.grab().toImage()
        if is_painted(image, colours) or time.monotonic() > end:
            print(text)  # noqa: T201
            application.exit(0 if image.save(str(picture)) else 1)
        else:
            QTimer.singleShot(AGAIN_MS, ask)

    def ask() -> None:
        view.page().toPlainText(shoot)

    def loaded(is_done: bool) -> None:
        if is_done:
            ask()
        else:
            application.exit(1)

    view.loadFinished.connect(loaded)
    view.show()
    view.load(QUrl.fromLocalFile(str(page.absolute())))
    return int(application.exec())


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")
    code = main()
    sys.stdout.flush()
    # Qt's own end may wait for its helper processes.
    os._exit(code)
