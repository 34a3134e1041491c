"""A picture as a person sees it in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from autopipe.cli.drawing.picture import Picture
from autopipe.cli.drawing.sparkline import draw_memory
from autopipe.cli.drawing.terminal import draw_timeline

_PIPED_WIDTH = 160
"""Characters a line where the stream is no terminal."""


def draw_picture(picture: Picture, stream: Console) -> Iterator[Text]:
    """The timeline and, below it, the memory, as wide as the stream takes; in colours where it shows them."""
    width = stream.width if stream.is_terminal else _PIPED_WIDTH
    colour = stream.is_terminal and not stream.no_color
    yield from draw_timeline(picture, width, colour)
    yield Text()
    yield from draw_memory(picture, width, colour)
