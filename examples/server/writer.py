"""Writer: converts tokens to the text of an answer, on the engine's thread."""

from typing import Any


class Stops:
    """Holds text back as long as it may be the beginning of a stop text."""

    def __init__(self, stops: list[str]) -> None:
        self._stops, self._held, self.found = stops, "", False

    def push(self, text: str, *, may_stop: bool = True, final: bool = False) -> str:
        """Add text, and return what can be sent; nothing after the end. ``may_stop=False`` finds no end."""
        if self.found:
            return ""
        num_held, self._held = len(self._held), self._held + text
        # A stop within held text was not allowed to end the text.
        found = (self._held.find(stop, max(0, num_held - len(stop) + 1)) for stop in self._stops)
        if may_stop and (ends := [at for at in found if at >= 0]):
            out, self._held, self.found = self._held[: min(ends)], "", True
            return out
        longest = 0 if final else max((self._length_of_partial(stop) for stop in self._stops), default=0)
        cut = len(self._held) - longest
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _length_of_partial(self, stop: str) -> int:
        """How many characters at the end of the held text are the beginning of `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)


class Writer:
    """Converts the tokens of a request to text.

    Parameters
    ----------
    decoder
        Has `push(token)` and `finish()`, which return complete text.
    stops : list of str
        The text ends before the first of these.
    min_tokens : int
        A stop that is complete with so many tokens does not end the text.

    Attributes
    ----------
    num_tokens : int
        Tokens so far.
    """

    def __init__(self, decoder: Any, stops: list[str], min_tokens: int = 0) -> None:
        self._decoder, self._stops, self._min_tokens = decoder, Stops(stops), min_tokens
        self.num_tokens = 0

    def push(self, token: int, reason: str) -> tuple[str, str]:
        """Add a token; return the text that is certain now, and why it ends. A token that ends the text adds none."""
        self.num_tokens += 1
        text = "" if reason == "stop" else self._decoder.push(token)
        if reason:
            text += self._decoder.finish()
        text = self._stops.push(text, may_stop=self.num_tokens > self._min_tokens, final=bool(reason))
        return text, "stop" if self._stops.found else reason
