"""The control socket of a scheduler: one thread that sleeps until somebody asks.

On standby it is there as long as the process. Where it came into a running process it goes with the attachment.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import Any

from kvwitness.patches.config import Config
from kvwitness.patches.instance import sglang_version
from kvwitness.patches.recorder import JournalError
from kvwitness.patches.schema import control
from kvwitness.patches.schema.control import Problem, State
from kvwitness.patches.standby.attachment import Attachment, Ending, Refused, check_scheduler, ranks_of
from kvwitness.patches.standby.step import NoLoop, NoStep, Stepper
from kvwitness.patches.start import is_id

logger = logging.getLogger("kvwitness")

THREAD = "kvwitness-standby"
_READ_S = 5.0
"""Time that a peer has to say what it wants."""
_STEP_S = 15.0
"""Time that the scheduler has to come by."""
_SNAPSHOT_S = 30.0
"""Time for which an answer waits for the snapshot, which goes on without it."""
_IDLE_S = 60.0
"""Time that a socket which came into a running process waits for whoever put it there."""
_CREDENTIALS = struct.Struct("3i")
_ABOUT = ("tool", "stopped_us", "python", "kvwitness")
"""What may be told to the journal about the way in."""


class Listener:
    """Answers status, attach, detach and leave, one at a time. ``stays``: for as long as the process lives."""

    def __init__(self, config: Config, *, stays: bool = True) -> None:
        self._config = config
        self._stays = stays
        self._over = False
        self._path: Path | None = None
        self._scheduler: Any = None
        self._attachment: Attachment | None = None
        self._stepper: Stepper | None = None
        self._rounds = 0
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Make the socket and the thread. Raises OSError when the folder or the socket cannot be had."""
        folder = self._config.directory / control.FOLDER
        self._config.directory.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder)
        name = control.socket_name(os.getpid())
        (folder / name).unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with control.short_path(folder, name) as path:
                listening.bind(path)
            (folder / name).chmod(0o600)
            listening.listen(4)
        except BaseException:
            listening.close()
            raise
        if not self._stays:
            listening.settimeout(_IDLE_S)
        self._socket, self._path, self._pid = listening, folder / name, os.getpid()
        atexit.register(self._unlink)
        threading.Thread(target=self._serve, args=(listening,), name=THREAD, daemon=True).start()

    def ready(self, scheduler: Any) -> None:
        """The scheduler is constructed."""
        self._scheduler = scheduler

    @property
    def listening(self) -> bool:
        """Whether there is a socket and a thread."""
        return self._socket is not None

    @property
    def path(self) -> str:
        """The socket's file; "" before :meth:`start`."""
        return "" if self._path is None else str(self._path)

    def _unlink(self) -> None:
        if self._path is not None and os.getpid() == self._pid:
            self._path.unlink(missing_ok=True)

    def _serve(self, listening: socket.socket) -> None:
        while not self._over:
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                self._over = self._attachment is None
                continue
            except OSError:
                break
            with connection:
                try:
                    self._answer(connection)
                except Exception:
                    logger.debug("kvwitness: a control connection failed", exc_info=True)
                if self._over:
                    # Before the connection is closed: whoever asked sees by that that nothing is left.
                    self._end()
        self._end()

    def _end(self) -> None:
        """Leave nothing behind: no socket, no file, no reference to the scheduler."""
        if self._socket is None:
            return
        self._unlink()
        atexit.unregister(self._unlink)
        self._socket.close()
        self._socket = self._scheduler = None

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_READ_S)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] != os.geteuid():
            return
        request = _read_line(connection)
        answer = self._obey(request)
        connection.sendall(json.dumps(answer, default=str).encode() + b"\n")

    def _obey(self, request: dict[str, Any]) -> dict[str, Any]:
        command = request.get("command")
        try:
            if command == control.STATUS:
                return self.status()
            if command == control.ATTACH:
                return self._attach(request)
            if command == control.DETACH:
                return self._detach()
            if command == control.LEAVE:
                return self._leave()
            raise Refused(Problem.FAILED, f"unknown command {command!r}")
        except Refused as refused:
            return {"ok": False, "problem": refused.problem, "error": str(refused)}
        except NoStep as error:
            return {"ok": False, "problem": Problem.NO_STEP, "error": str(error)}
        except (JournalError, OSError) as error:
            return {"ok": False, "problem": Problem.NO_JOURNAL, "error": str(error)}
        except Exception as error:
            logger.warning("kvwitness: %s failed", command, exc_info=True)
            return {"ok": False, "problem": Problem.FAILED, "error": f"{type(error).__name__}: {error}"}

    # --- commands ------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What this process is and what it is doing. Reads only."""
        answer: dict[str, Any] = {
            "ok": True,
            "pid": os.getpid(),
            "state": State.STARTING,
            "sglang": sglang_version(),
            "directory": str(self._config.directory),
            "rounds": self._rounds,
            "way": self._way,
        }
        scheduler = self._scheduler
        if scheduler is None:
            return answer
        tree = getattr(scheduler, "tree_cache", None)
        answer["state"] = State.IDLE if self._attachment is None else State.ATTACHED
        answer["tree_class"] = type(tree).__name__
        answer["tree_core"] = type(getattr(tree, "tree_core", None)).__name__
        answer["ranks"] = ranks_of(scheduler)
        answer["page_size"] = getattr(tree, "page_size", None)
        controller = getattr(tree, "cache_controller", None)
        answer["hicache"] = controller is not None
        answer["write_policy"] = getattr(controller, "write_policy", None)
        try:
            check_scheduler(scheduler)
        except Refused as refused:
            answer["problem"], answer["error"] = refused.problem, str(refused)
        attachment = self._attachment
        if attachment is not None:
            answer["journal"] = attachment.journal
            answer["hooks"] = attachment.hooks
            answer["snapshot"] = attachment.snapshot_facts()
        return answer

    @property
    def _way(self) -> str:
        return control.Way.STANDBY if self._stays else control.Way.LIVE

    def _leave(self) -> dict[str, Any]:
        if self._stays:
            raise Refused(Problem.OTHERS, "it is on standby, and stays so")
        if self._attachment is not None:
            raise Refused(Problem.ATTACHED, f"it is attached, recording into {self._attachment.journal}")
        self._over = True
        return {"ok": True, "pid": os.getpid()}

    def _attach(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._scheduler is None:
            raise Refused(Problem.STARTING, "the scheduler is still starting")
        if self._attachment is not None:
            raise Refused(Problem.ATTACHED, f"already attached, recording into {self._attachment.journal}")
        about = {name: request[name] for name in _ABOUT if isinstance(request.get(name), str | int)}
        start = request.get(control.START)
        start = start if is_id(start) else None
        attachment = Attachment(self._config, self._scheduler, {"way": self._way, **about}, start)
        attachment.prepare()
        try:
            stepper = Stepper(self._scheduler, attachment)
            stepper.offer(_STEP_S)
            if not stepper.wait(lambda: attachment.standing, _STEP_S):
                attachment.withdrawn = True
                stepper.wait(lambda: False, _STEP_S)
                if not attachment.standing:
                    raise NoStep(f"copies were under way for {_STEP_S:.0f} s")
                attachment.withdrawn = False
            if not attachment.standing:
                raise stepper.error or NoStep("the scheduler let go of it")
        except BaseException as error:
            attachment.withdrawn = True
            attachment.close(keep=False)
            if isinstance(error, NoLoop):
                raise Refused(Problem.UNKNOWN_TREE, str(error)) from error
            raise
        self._attachment, self._stepper = attachment, stepper
        self._rounds += 1
        stepper.wait(lambda: False, _SNAPSHOT_S)
        return {
            "ok": True,
            "pid": os.getpid(),
            "journal": attachment.journal,
            "hooks": attachment.hooks,
            "pause_us": attachment.pause_ns // 1000,
            "snapshot": attachment.snapshot_facts(),
        }

    def _detach(self) -> dict[str, Any]:
        attachment, stepper = self._attachment, self._stepper
        if attachment is None or stepper is None:
            raise Refused(Problem.NOT_ATTACHED, "not attached")
        attachment.withdrawn = True
        if not stepper.wait(lambda: False, _STEP_S):
            raise NoStep(f"the scheduler did not begin a step in {_STEP_S:.0f} s")
        ending = Stepper(self._scheduler, Ending(attachment))
        ending.offer(_STEP_S)
        ending.wait(lambda: False, _STEP_S)
        if ending.error is not None:
            raise ending.error
        self._attachment = self._stepper = None
        attachment.close(keep=True)
        self._over = not self._stays
        return {
            "ok": True,
            "pid": os.getpid(),
            "journal": attachment.journal,
            "restored": attachment.hooks - len(attachment.left),
            "not_restored": list(attachment.left),
        }


def _check_private(folder: Path) -> None:
    """The folder must be ours and nobody else's, or who can write there can replace the socket."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder of this user")
    if found.st_mode & 0o077:
        with contextlib.suppress(OSError):
            folder.chmod(0o700)
        if folder.lstat().st_mode & 0o077:
            raise PermissionError(f"{folder} is open to other users")


def _read_line(connection: socket.socket) -> dict[str, Any]:
    raw = b""
    while not raw.endswith(b"\n"):
        part = connection.recv(4096)
        if not part or len(raw) > control.LINE_LIMIT:
            break
        raw += part
    request = json.loads(raw or b"{}")
    return request if isinstance(request, dict) else {}
