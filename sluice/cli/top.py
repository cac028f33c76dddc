"""`sluice top`: the cluster live, on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.cli.slurm_options import where_options

if TYPE_CHECKING:
    from sluice.exchange.live import Live
    from sluice.slurm import SlurmClient
    from sluice.top.look import Cluster, Look
    from sluice.top.screen import Screen

_ASK_S = 15.0
_AWAY_S = 60.0  # a controllers' daemon that does not answer is left alone so long


@click.command("top")
@click.option(
    "-d",
    "--delay",
    type=click.FloatRange(1, 3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks; each costs slurmctld two requests.",
)
@click.option(
    "--part",
    type=click.Choice(["gpus", "jobs", "tenants", "queue", "events", "devices"]),
    default="gpus",
    show_default=True,
    help="What is shown first.",
)
@click.option("--once", is_flag=True, help="Print one look as text and end; also where there is no terminal.")
@click.option(
    "--events",
    type=click.Path(path_type=Path, readable=False),
    default=Path("/var/lib/sluice/controllerd/events.jsonl"),
    metavar="FILE",
    show_default=True,
    help="The controller's events, where this user may read them.",
)
@where_options
def command(delay: float, part: str, once: bool, events: Path, conf: Path | None, prefix: Path | None) -> None:
    """GPUs, jobs, tenants, the queue and what happens, live. Needs 80 columns; works over ssh.

    Keys: 1 to 6 or Tab choose a part, Enter opens, Esc goes back, s sorts by the next column, r turns the order,
    / filters, p pauses, Ctrl-L redraws, q quits.
    """
    from sluice.base.errors import SluiceError
    from sluice.slurm import connect
    from sluice.top.look import Cluster
    from sluice.top.screen import Screen

    client = connect(conf=conf, prefix=prefix, timeout=30)
    cluster = Cluster(client, events, live=_live(client, conf))
    screen = Screen(part=part)
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        screen.look = cluster.look()
        rows = len(screen.rows())
        for text, _ in screen.lines(_columns(), rows + 6 + bool(screen.look.problem))[:-1]:
            click.echo(text)
        if screen.look.problem:
            raise SluiceError(screen.look.problem, remedy="ask for the controllers: scontrol ping")
        return
    _run(cluster, screen, delay)


def _live(client: SlurmClient, conf: Path | None) -> Callable[[float], Live]:
    """What the controllers' daemon knows: all of it for root and SlurmUser on a controller, elsewhere of jobs only."""
    from sluice.base.errors import SluiceError
    from sluice.exchange.live import LIVE_FILE, Live, read_live
    from sluice.exchange.running import ask_running, live_of

    try:
        state = client.config().get("StateSaveLocation", "").partition(",")[0]
    except SluiceError:
        state = ""
    file = Path(state) / LIVE_FILE if state.startswith("/") else None
    again, known = 0.0, Live()

    def look(now: float) -> Live:
        nonlocal again, known
        if file is not None and os.access(file, os.R_OK):
            return read_live(file, now)
        if now >= again:
            try:
                again, known = now + _ASK_S, live_of(ask_running(conf=conf))
            except (SluiceError, OSError):
                again, known = now + _AWAY_S, Live()
        return known

    return look


def _columns() -> int:
    import shutil

    return max(80, shutil.get_terminal_size().columns)


def _run(cluster: Cluster, screen: Screen, delay: float) -> None:
    import curses
    import locale

    from sluice.base.errors import UsageError

    locale.setlocale(locale.LC_ALL, "")
    os.environ.setdefault("ESCDELAY", "25")
    try:
        curses.wrapper(_show, cluster, screen, delay)
    except curses.error as error:
        raise UsageError(f"this terminal cannot be drawn on: {error}", remedy="set TERM, or use --once") from error


class _Looker:
    """Looks again and again in a thread, so that a slow slurmctld does not hold up the keys."""

    def __init__(self, cluster: Cluster, delay: float) -> None:
        self.cluster, self.delay = cluster, delay
        self.latest: Look | None = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._again, daemon=True)

    def _again(self) -> None:
        while not self.stop.is_set():
            self.latest = self.cluster.look()
            self.stop.wait(self.delay)


def _show(window: Any, cluster: Cluster, screen: Screen, delay: float) -> None:
    import curses

    from sluice.top import screen as styles

    curses.use_default_colors()
    looks = {
        styles.PLAIN: curses.A_NORMAL,
        styles.HEAD: curses.A_BOLD,
        styles.CURSOR: curses.A_REVERSE,
        styles.WARN: curses.A_BOLD | curses.A_STANDOUT,
    }
    with contextlib.suppress(curses.error):  # a terminal that cannot hide it
        curses.curs_set(0)
    window.timeout(200)
    looker = _Looker(cluster, delay)
    looker.thread.start()
    try:
        while True:
            if looker.latest is not None and not screen.paused:
                screen.look = looker.latest
            _draw(window, screen, looks)
            key = _key(window)
            if key == "\x0c":
                window.clearok(True)  # something else wrote on the terminal
            elif key is not None and not screen.key(key):
                return
    except KeyboardInterrupt:
        return
    finally:
        looker.stop.set()


def _draw(window: Any, screen: Screen, looks: dict[str, int]) -> None:
    import curses

    height, width = window.getmaxyx()
    window.erase()
    # The last cell of the last line cannot be written without scrolling.
    for place, (text, style) in enumerate(screen.lines(width - 1, height)):
        try:
            window.addstr(place, 0, text, looks[style])
        except curses.error:
            break  # the terminal shrank just now
    window.refresh()


def _key(window: Any) -> str | None:
    import curses

    named = {
        curses.KEY_UP: "up",
        curses.KEY_DOWN: "down",
        curses.KEY_PPAGE: "pageup",
        curses.KEY_NPAGE: "pagedown",
        curses.KEY_HOME: "home",
        curses.KEY_END: "end",
        curses.KEY_LEFT: "left",
        curses.KEY_RIGHT: "right",
        curses.KEY_ENTER: "enter",
        curses.KEY_BACKSPACE: "back",
    }
    try:
        key = window.get_wch()
    except curses.error:
        return None
    if isinstance(key, int):
        return named.get(key)
    text = str(key)
    return {"\n": "enter", "\r": "enter", "\x1b": "esc", "\x7f": "back", "\x08": "back"}.get(text, text)
