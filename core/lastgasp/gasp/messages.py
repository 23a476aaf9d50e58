"""The messages between ranks and controller: typed, versioned, pickle-free.

A frame is a 4-byte big-endian length and a msgpack array tagged with the message's name. Ranks speak
first only after the controller's Challenge; until the token is proven a frame may be 64 KiB at most.
An operator (`lastgasp ps`, `lastgasp switch`) proves the token in the same way, in a role of its own, and then
asks; it is not a rank.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from lastgasp.errors import ProtocolError
from lastgasp.events import Ending, Fault

from .again import Again
from .arena_ref import ArenaRef as ArenaRef
from .asks import AskRanks as AskRanks
from .asks import AskSwitch as AskSwitch
from .asks import Operator as Operator
from .asks import Ranks as Ranks
from .asks import SwitchDone as SwitchDone
from .asks import Switched as Switched
from .asks import SwitchOrder as SwitchOrder
from .buddy_messages import Copied as Copied
from .buddy_messages import Listens as Listens
from .buddy_messages import Offers as Offers
from .buddy_messages import Pair as Pair
from .buddy_messages import Remarked as Remarked
from .buddy_messages import Sender as Sender
from .buddy_messages import Sends as Sends
from .buddy_messages import Took as Took
from .cards import WorkerCard
from .going_on import Fewer as Fewer
from .going_on import Resize as Resize
from .going_on import ResizeNoted as ResizeNoted
from .keeping import Agreed as Agreed
from .keeping import AskKept as AskKept
from .keeping import AskLeft as AskLeft
from .keeping import Completed as Completed
from .keeping import DropLeft as DropLeft
from .keeping import Exited as Exited
from .keeping import Forks as Forks
from .keeping import JobOver as JobOver
from .keeping import Keep as Keep
from .keeping import Keeper as Keeper
from .keeping import Kept as Kept
from .keeping import Left as Left
from .keeping import RefusedToStart as RefusedToStart
from .wire import HEADER as HEADER
from .wire import Message as Message
from .wire import Role as Role
from .wire import body_size as body_size
from .wire import encodable as encodable
from .wire import one_line as one_line
from .wire import proof as proof
from .wire import proven as proven

T = TypeVar("T")
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
PROTOCOL = 15
MAX_GREETING, MAX_FRAME = 64 * 1024, 256 * 1024 * 1024
MAX_ASK = 1024 * 1024
"""Bytes of a frame of an operator: room for 200,000 ranks by number."""
CALLED_OFF = 1 << 62
"""As the target of a Prepare: nobody needs to stop any more."""
BUSY, MANY_OPERATORS = "too many connections: try again", "too many operators are connected already: try again later"
"""Reasons of a Refused after which one may retry: unauthenticated connections fill the port, or operators do."""
NOT_YET = "other ranks are still in an earlier training of the script"
"""The same: this rank has ended that training, and its next one has another directory, say."""

Phase = Literal["start", "data", "forward", "backward", "update", "between", "validation", "save"]


class Challenge(Message, frozen=True, kw_only=True):
    """Controller, first message: prove that you know the token."""

    protocol: int
    version: str
    nonce: bytes
    host: str


class Hello(Message, frozen=True, kw_only=True):
    """Rank: the proof, and who I am."""

    protocol: int
    version: str
    nonce: bytes
    mac: bytes
    job: str
    attempt: int
    rank: int
    world_size: int
    replicas: bytes
    """`groups.pack`: the holders of each shard; not parsed before the token is proven."""
    host: str
    pid: int
    directory: str
    hang_timeout: float
    """Seconds; 0 learns it from the run."""
    save_timeout: float
    finish_timeout: float
    incarnation: int = 0
    """How often the ranks of this attempt have been entered again in place."""


class Welcome(Message, frozen=True, kw_only=True):
    """Controller: its own proof."""

    mac: bytes
    started_s: int
    """When this controller started, unix seconds: the same for all ranks and attempts of the job."""


class Refused(Message, frozen=True, kw_only=True):
    """Controller: refused; the connection is closed."""

    reason: str


class Begin(Message, frozen=True, kw_only=True):
    """Rank: training begins (or resumes) after `step`, of which `durable` are in a committed checkpoint."""

    step: int
    durable: int
    buffer_fd: int
    """File descriptor number of the rank's crash-safe buffer (opened through /proc by who shares the host), or -1."""
    recovery: str = ""
    """Which faults may be answered in place (`config.Recovery`); empty if this rank cannot be entered again; later if
    it can, but no rank be replaced; fewer if it can where ranks are missing from then on, and in no other case. A rank
    with an arena that can begins with its own part, as all others do then."""
    entered: bool = True
    """False: after a fault this rank holds `step` in memory, and is about to enter its training again."""
    together: tuple[tuple[int, ...], ...] = ()
    """Shards, by number, whose savers must know of one another where this rank is one (`ports.SavesTogether`)."""
    arena_fd: int = -1
    """As `buffer_fd`, of the rank's arena."""
    arena_id: bytes = b""
    """`Arena.identity`."""
    from_files: bool = False
    """Entered again, this rank begins with the newest checkpoint, and not with what ranks hold in memory."""
    fewer: Fewer = Fewer()
    """Whether its training may be entered again with fewer ranks."""
    buddy: bool = False
    """Steps of its arena are to go to a partner host."""


class Regroup(Message, frozen=True, kw_only=True):
    """Rank, before its Begin: the digests of supposed replicas differ, so they are none.

    `replicas` is Hello's with each group split into equal parts; all ranks send the same. `why` is for people.
    """

    replicas: tuple[tuple[int, ...], ...]
    why: str


class Status(Message, frozen=True, kw_only=True):
    """Rank, twice a second: my current step. `tick` changes with any progress at all."""

    step: int
    durable: int
    tick: int
    phase: Phase
    marks: int = -1
    """The marks that are on (`steps.bits`); -1: this rank marks nothing."""


class Report(Message, frozen=True, kw_only=True):
    """Rank: something went wrong here. `passing`: the same step may succeed when it is done again."""

    fault: Fault
    passing: bool = False


class Prepare(Message, frozen=True, kw_only=True):
    """Controller: stop before the update that follows `target`, and report which step you hold.

    `target` is the newest step that any rank has completed, dead ones included: ranks behind it may already have all
    its gradients and get a moment to complete it too. While no rank has stopped it is the newest step that any rank
    has begun. A Prepare with a greater target lets a rank continue that has stopped before it; with `CALLED_OFF` all
    train on, and none answers. Without `faults` ranks stop because others are to be taken in.
    """

    recovery: int
    faults: tuple[Fault, ...]
    target: int = -1


class Entered(Message, frozen=True, kw_only=True):
    """Rank, before its Prepared: I have begun `step`, beyond your target, and may need the other ranks to end it."""

    recovery: int
    step: int


class Prepared(Message, frozen=True, kw_only=True):
    """Rank: I hold `step` and can write it, or cannot, and why. `target` is copied from the order answered.

    Where it is usable, `why` says why its training cannot be entered again in place, `no_fewer` why not with fewer.
    `arena`: the steps in its arena; `cut_short`: it raised behind the update of `step`; `ends`: its own to other hosts.
    """

    recovery: int
    step: int
    durable: int
    usable: bool
    why: str = ""
    no_fewer: str = ""
    aux: bytes = b""
    target: int = -1
    arena: tuple[int, ...] = ()
    cut_short: bool = False
    ends: tuple[str, ...] = ()


class Save(Message, frozen=True, kw_only=True):
    """Controller: write the state of `step` to temporary files.

    Where shards are held by single ranks, `own` says whether this rank writes what it holds itself, `arenas` which
    arenas it writes in the name of their ranks, and `common` whose copy of what all ranks have alike is saved.
    """

    recovery: int
    plan: int
    step: int
    aux: dict[int, bytes]
    reason: str
    together: tuple[tuple[int, ...], ...] = ()
    """The savers of the shards that Begin names, in the same order."""
    own: bool = True
    common: int = -1
    arenas: tuple[ArenaRef, ...] = ()


class Saved(Message, frozen=True, kw_only=True):
    """Rank: written and fsynced, not yet visible. `part` is opaque data for the committing rank."""

    recovery: int
    plan: int
    path: str
    nbytes: int
    first_byte_ns: int
    part: bytes = b""


class SaveFailed(Message, frozen=True, kw_only=True):
    """Rank: could not write. `arena`: because the arena of that rank is damaged; -1: for another reason."""

    recovery: int
    plan: int
    why: str
    arena: int = -1


class Commit(Message, frozen=True, kw_only=True):
    """Controller, to one saver after all have saved: make it visible."""

    recovery: int
    plan: int
    parts: dict[int, bytes]


class Committed(Message, frozen=True, kw_only=True):
    """Rank: visible and durable."""

    recovery: int
    plan: int


class Discard(Message, frozen=True, kw_only=True):
    """Controller: this plan is void, remove its temporaries."""

    recovery: int
    plan: int


class Release(Message, frozen=True, kw_only=True):
    """Controller: the recovery is over; exit, or where `again` is set enter the training again."""

    recovery: int
    ending: Ending
    step: int
    path: str
    reason: str
    again: Again | None = None


class GatherPart(Message, frozen=True, kw_only=True):
    """Rank: my part of an all-gather, which may take so many seconds, or as long as any."""

    tag: str
    payload: bytes
    seconds: float = 0.0


class Gathered(Message, frozen=True, kw_only=True):
    """Controller: all parts, by rank; or `missing` says why the gather failed."""

    tag: str
    parts: tuple[bytes, ...]
    missing: str = ""


class Goodbye(Message, frozen=True, kw_only=True):
    """Rank: training ended; my exit is not a fault."""


class Farewell(Message, frozen=True, kw_only=True):
    """Controller: your Goodbye was received."""


class Register(Message, frozen=True, kw_only=True):
    """Rank, once, after its process group is up and before its first step: who I am. Goodbye takes it back."""

    card: WorkerCard


class Led(Message, frozen=True, kw_only=True):
    """Rank, before its Begin: `by` (MindIO) leads the recoveries of this job, the controller only keeps and records.

    At the end of a training: nobody (empty) does any more, and the controller leads those of the next one.
    """

    by: str


class Consult(Message, frozen=True, kw_only=True):
    """Rank of a job led by another backend: what do you keep of `step`? With `saved` also: keep this."""

    step: int
    saved: Saved | None = None


class Consulted(Message, frozen=True, kw_only=True):
    """Controller: the auxiliary states and the parts of the ranks that have saved `step`."""

    step: int
    aux: dict[int, bytes]
    parts: dict[int, bytes]


class Ended(Message, frozen=True, kw_only=True):
    """Rank of a job led by another backend: how the recovery ended. The controller releases all ranks."""

    ending: Ending
    step: int
    path: str
    reason: str


class Noted(Message, frozen=True, kw_only=True):
    """Rank: a note for the incident's record (`Session.note`)."""

    text: str


FromRank = (
    Hello | Begin | Status | Report | Prepared | Saved | SaveFailed | Committed | GatherPart | Goodbye | Register
    | Switched | Led | Consult | Ended | Entered | Noted | Regroup | AskLeft | DropLeft | Resize
)  # fmt: skip
FromController = (
    Challenge | Welcome | Refused | Prepare | Save | Commit | Discard | Release | Gathered | SwitchOrder | Ranks
    | SwitchDone | Consulted | Farewell | Keep | AskKept | Left | Agreed | Pair | Took | ResizeNoted
    | RefusedToStart | Completed | JobOver
)  # fmt: skip
FromOperator = Operator | AskRanks | AskSwitch
FromKeeper = Keeper | Kept | Forks | Exited | Listens | Copied | Remarked
FromSender = Sender | Offers | Sends
Greeting = Hello | Operator | Keeper

_encoder = msgspec.msgpack.Encoder()
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_from_controller: msgspec.msgpack.Decoder[FromController] = msgspec.msgpack.Decoder(FromController)
_from_operator: msgspec.msgpack.Decoder[FromOperator] = msgspec.msgpack.Decoder(FromOperator)
_from_keeper: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)
_from_sender: msgspec.msgpack.Decoder[FromSender] = msgspec.msgpack.Decoder(FromSender)
_greeting: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)


def frame(message: Message) -> bytes:
    """Encode a message as a frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"{type(message).__name__} of {len(body)} bytes; a frame has at most {MAX_FRAME}")
    return len(body).to_bytes(HEADER, "big") + body


def from_rank(body: bytes) -> FromRank:
    """Decode a message of a rank.

    Raises:
        ProtocolError: it is not one.
    """
    return _decode(_from_rank, body)


def from_controller(body: bytes) -> FromController:
    """Decode a message of the controller.

    Raises:
        ProtocolError: it is not one.
    """
    return _decode(_from_controller, body)


def from_operator(body: bytes) -> FromOperator:
    """Decode a message of an operator.

    Raises:
        ProtocolError: it is not one.
    """
    return _decode(_from_operator, body)


def from_keeper(body: bytes) -> FromKeeper:
    """Decode a message of a keeper.

    Raises:
        ProtocolError: it is not one.
    """
    return _decode(_from_keeper, body)


def from_sender(body: bytes) -> FromSender:
    """Decode a message of a partner host's launcher.

    Raises:
        ProtocolError: it is not one.
    """
    return _decode(_from_sender, body)


def greeting(body: bytes) -> Greeting:
    """Decode the first frame of a rank or an operator.

    Raises:
        ProtocolError: it is not one.
    """
    return _decode(_greeting, body)


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except _BAD as error:
        raise ProtocolError(f"not a message of protocol {PROTOCOL}: {error}") from None
