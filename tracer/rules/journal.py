"""Rules of what a process says of itself: texts, facts, hooks that failed, weights, its end."""

from __future__ import annotations

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.described import Instance, read_as
from kvwitness.tracer.ledger.describing import Describing, impossible, read_facts
from kvwitness.tracer.ledger.facts import Moment, WeightsChange
from kvwitness.tracer.ledger.state import State
from kvwitness.tracer.rules.declare import Broken, Rules, always

JOURNAL = Rules()

UNREADABLE = "Facts: can be read"
"""Name of the guard that is broken where the record itself cannot be read."""

JOURNAL.within(ev.Text, 1, None, "id")


@JOURNAL.guard(ev.Text, "a number has one meaning")
def _one_meaning(s: State, e: ev.Text) -> Broken | None:
    """A number is given away once: from a second meaning on nobody knows whom an event names."""
    return always("a text's number was given a second meaning", e.seq) if s.names.is_renamed(e.id, e.text) else None


@JOURNAL.effect(ev.Text)
def _a_number_stands_for_a_text(s: State, e: ev.Text, _: Moment) -> None:
    """Events name requests, hooks and policies by this number from here on."""
    s.names.learn(e.id, e.text)


# --- facts -------------------------------------------------------------------------------------------


@JOURNAL.guard(ev.Facts, "can be read", also="kind json")
def _readable(_: State, e: ev.Facts) -> Broken | None:
    """Facts are a JSON object whose fields are of the declared types."""
    wrong = Describing.unreadable(e)
    return None if wrong is None else always(wrong, e.seq)


@JOURNAL.guard(ev.Facts, "are not taken back", also="kind json")
def _not_taken_back(s: State, e: ev.Facts) -> Broken | None:
    """A fact about the instance or its process holds from its event on: a later event does not tell it otherwise."""
    found = s.told.taken_back(e)
    if found is None:
        return None
    since, name = found
    return always(f"event {e.seq} tells {name} otherwise than event {since}")


@JOURNAL.guard(ev.Facts, "keep the hooks", also="kind json")
def _keep_the_hooks(s: State, e: ev.Facts) -> Broken | None:
    """A later list of hooks has all of the earlier one; only what was pending has another status."""
    name = s.told.hooks_taken_back(e)
    return None if name is None else always(f"event {e.seq} tells otherwise of hook {name} than before", 0)


@JOURNAL.guard(ev.Facts, "are of an instance that can be", also="kind json")
def _possible(s: State, e: ev.Facts) -> Broken | None:
    """Sizes are at least 1, a rank lies below the size of its group, a host pool is whole pages, pools have numbers."""
    said = read_facts(e) if e.kind == ev.FactKind.INSTANCE else None
    wrong = impossible(read_as(Instance, said.raw)) if said is not None else None
    return None if wrong is None else always(f"event {e.seq} tells what no instance is: {wrong}", 0)


@JOURNAL.guard(ev.Facts, "come before the copies")
def _before_the_copies(s: State, e: ev.Facts) -> Broken | None:
    """What the instance is, is told before its first copy: only that says what a copy of so many tokens has to be."""
    if e.kind == ev.FactKind.INSTANCE and not s.told.instance_at and s.transfers.numbers:
        return Broken("transfers were recorded before what the instance is", since=0)
    return None


@JOURNAL.guard(ev.Facts, "fit the pages that were seen")
def _fit_the_pages(s: State, e: ev.Facts) -> Broken | None:
    """Host slots are told of after what the instance is, for its page says what a slot run is."""
    if e.kind == ev.FactKind.INSTANCE and not s.told.instance_at and s.counted:
        return Broken("host slots were recorded before what the instance is", since=0)
    return None


@JOURNAL.effect(ev.Facts, also="kind json")
def _the_instance_is_known(s: State, e: ev.Facts, _: Moment) -> None:
    """What the instance, its process, its hooks and its attaching are; each holds from its event on."""
    s.told.take(e)
    s.host.page = s.told.page


# --- hooks that failed -------------------------------------------------------------------------------

JOURNAL.within(ev.HookFailed, 1, None, "count")


@JOURNAL.guard(ev.HookFailed, "counts upwards")
def _counts_upwards(s: State, e: ev.HookFailed) -> str | None:
    """Each failure of a hook is one more than the one before."""
    name = s.names.get(e.hook) or str(e.hook)
    known = s.failures.get(name)
    return None if known is None or e.count > known else f"failure {e.count} of hook {name} follows failure {known}"


@JOURNAL.guard(ev.HookFailed, "names a hook")
def _names_a_hook(s: State, e: ev.HookFailed) -> Broken | None:
    """Which hook failed is known: it is one of those that were told."""
    name = s.names.get(e.hook)
    known = {hook.name for hook in s.told.hooks}
    # Digests of pages are taken behind the hooks' backs, and fail under a name of their own.
    if not known or name in known or name == "page_digests":
        return None
    return always(f"event {e.seq} tells a failure of a hook that is not known", e.seq)


@JOURNAL.effect(ev.HookFailed)
def _a_hook_is_not_sound(s: State, e: ev.HookFailed, _: Moment) -> None:
    """What the hook saw in that call is not known."""
    s.failures[s.names.get(e.hook) or str(e.hook)] = e.count


# --- weights -----------------------------------------------------------------------------------------

JOURNAL.within(ev.WeightsUpdated, 0, 1, "ok", "flushed")


@JOURNAL.guard(ev.WeightsUpdated, "is the next change")
def _next_change(s: State, e: ev.WeightsUpdated) -> Broken | None:
    """The changes of a process are numbered without a hole (an attached record begins somewhere)."""
    if s.weights:
        last = s.weights[-1]
        if e.update != last.update + 1:
            return Broken(f"change {e.update} of the weights follows change {last.update}", since=last.moment.seq)
    elif e.update != 1 and not s.attached.begun:
        return Broken(f"the first change of the weights that was recorded is change {e.update}", since=0)
    return None


@JOURNAL.guard(ev.WeightsUpdated, "is of a known kind")
def _known_kind(s: State, e: ev.WeightsUpdated) -> str | None:
    """How the weights were changed is one of the declared ways."""
    return None if e.kind in ev.WeightsKind.NAMES else f"the weights were changed in a way {e.kind} that is not known"


@JOURNAL.effect(ev.WeightsUpdated)
def _other_weights_compute(s: State, e: ev.WeightsUpdated, m: Moment) -> None:
    """What is computed from here on has other weights; what was computed before keeps its own, in every tier."""
    s.weights.append(WeightsChange(e.update, e.kind, bool(e.ok), bool(e.flushed), e.label, m))


# --- the end -----------------------------------------------------------------------------------------


@JOURNAL.effect(ev.Closed)
def _the_record_ends(s: State, e: ev.Closed, _: Moment) -> None:
    """Nothing follows."""
    s.closed = e.seq
