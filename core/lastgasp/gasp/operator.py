"""The operator's end of the control connection: lists a job's ranks and switches their marks."""

from __future__ import annotations

from collections.abc import Sequence

from lastgasp import __version__, _clock
from lastgasp.errors import ControlError, DeadlineExceeded, LastgaspError

from . import messages as m
from .link import Channel, M

REACH = 5.0
"""Seconds to reach the controller and to be greeted; it answers in milliseconds unless its process is stopped."""
MARGIN = 5.0
"""Seconds for the controller's answer, beyond its own wait for ranks."""
NOBODY = -1
"""The rank number in an operator's proof."""


class OperatorLink(Channel):
    """Connects to a job's controller and asks one question at a time. Has no effect on recoveries.

    Args:
        address: host:port.
        token: the job's secret.
        seconds: to reach it; REACH by default.

    Raises (constructor):
        DeadlineExceeded: nobody listens at `address`.
        AuthenticationError: one side does not know the token.
        VersionMismatch, ControlError: refused, with the controller's reason; or it does not answer.
    """

    def __init__(self, address: str, token: str, seconds: float | None = None) -> None:
        super().__init__(address, REACH if seconds is None else seconds, retry=False)
        hello = m.Operator(protocol=m.PROTOCOL, version=__version__, nonce=b"", mac=b"")
        self._greet(token, "operator", NOBODY, hello)

    def ranks(self) -> m.Ranks:
        """Return the job's state and its ranks.

        Raises:
            ControlError: the controller is gone, or refused to answer, with its reason.
            DeadlineExceeded: it does not answer.
        """
        return self._ask(m.AskRanks(), m.Ranks, 0.0)

    def switch(self, ranks: Sequence[int] | None, on: int, off: int, wait: float = 5.0) -> m.SwitchDone:
        """Have the marks of `on` turned on and those of `off` turned off (`steps.bits`).

        Args:
            ranks: which ranks; None: all of them.
            wait: seconds that the ranks may take, 0.1 to 600.

        Returns:
            What each of them answered, or why it did not.

        Raises:
            ControlError: the controller is gone, or refused to do it, with its reason.
            DeadlineExceeded: it does not answer.
        """
        chosen = None if ranks is None else tuple(ranks)
        return self._ask(m.AskSwitch(ranks=chosen, on=on, off=off, wait=wait), m.SwitchDone, wait)

    def _ask(self, question: m.FromOperator, kind: type[M], seconds: float) -> M:
        limit = seconds + MARGIN
        self._deadline = _clock.monotonic() + limit
        try:
            self.send(question)
            return self._expect(kind, m.MAX_FRAME)
        except LastgaspError:
            raise
        except TimeoutError:
            what = f"the answer of the controller at {self._address}"
            raise DeadlineExceeded(what, limit, "Is its process stopped, or its host overloaded?") from None
        except (OSError, EOFError) as error:
            raise ControlError(f"the controller at {self._address} is gone: {error}") from error

    def __enter__(self) -> OperatorLink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
