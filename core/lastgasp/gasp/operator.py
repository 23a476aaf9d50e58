"""The operator's end of the control connection: lists a job's ranks and switches their marks."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lastgasp import __version__, _clock
from lastgasp.errors import ControlError, DeadlineExceeded, LastgaspError
from lastgasp.topology import Place

from . import messages as m
from .link import Busy, Channel, M

REACH = 5.0
"""Seconds to reach the controller and to be greeted; it answers in milliseconds unless its process is stopped."""
MARGIN = 5.0
"""Seconds for the controller's answer, beyond its own wait for ranks."""
BUSY = 30.0
"""Seconds to try again for, where too many ask at once."""
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

    def ranks(self, of: int | None = None) -> m.Ranks:
        """Return the job's state and its ranks, or that one alone.

        Raises:
            ControlError: the controller is gone, or refused to answer, with its reason.
            DeadlineExceeded: it does not answer.
        """
        return self._ask(m.AskRanks(of=of), m.Ranks, 0.0)

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


def ended_by_all(address: str, token: str, place: Place) -> bool:
    """Whether all ranks have ended by themselves the training that this one has, so that none waits for its end.

    False where the controller does not say.
    """
    deadline = _clock.monotonic() + BUSY
    while _clock.monotonic() < deadline:
        try:
            with OperatorLink(address, token) as link:
                found = link.ranks(place.rank)
        except Busy:
            threading.Event().wait(0.1 + place.rank % 16 / 16)
            continue
        except (LastgaspError, OSError):
            return False
        if (found.attempt, found.incarnation) != (place.attempt, place.incarnation):
            return False
        # In the script's next training, which some have begun already, this rank is awaited.
        return found.ended_by_all or any(row.state == "awaited" for row in found.rows)
    return False
