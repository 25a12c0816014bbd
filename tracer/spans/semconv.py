"""Every name that spans use: the constants, and what each of them means (docs/semantic-conventions.md).

Where OpenTelemetry has a convention its name is used; no convention knows cache tiers, so the rest is in
namespaces of our own: ``hicache.*`` for what SGLang's cache did, ``sglang.*`` for what the server says of
itself, ``kvwitness.*`` for what kvwitness concludes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""The OpenTelemetry conventions that the borrowed names were taken from."""

SERVICE: Final = "sglang"
SCOPE: Final = "kvwitness"


class Term(NamedTuple):
    """What one name means. ``type`` and ``unit`` are empty where a name has none."""

    name: str
    meaning: str
    type: str = ""
    unit: str = ""


SPANS: Final[dict[str, Term]] = {}
ATTRIBUTES: Final[dict[str, Term]] = {}
RESOURCE_ATTRIBUTES: Final[dict[str, Term]] = {}
EVENTS: Final[dict[str, Term]] = {}
RELATIONS: Final[dict[str, Term]] = {}


def _span(name: str, meaning: str) -> str:
    SPANS[name] = Term(name, meaning)
    return name


def _attribute(name: str, type_: str, unit: str, meaning: str) -> str:
    ATTRIBUTES[name] = Term(name, meaning, type_, unit)
    return name


def _resource(name: str, type_: str, meaning: str) -> str:
    RESOURCE_ATTRIBUTES[name] = Term(name, meaning, type_)
    return name


def _event(name: str, meaning: str) -> str:
    EVENTS[name] = Term(name, meaning)
    return name


def _relation(name: str, meaning: str) -> str:
    RELATIONS[name] = Term(name, meaning)
    return name


# --- spans: a trace per request ------------------------------------------------------------------------

REQUEST: Final = _span(
    "hicache.request",
    "A request on one scheduler process, from its queueing to its release, retractions included. "
    "It continues the client's span when the client sent one. "
    "Where several ranks served the request, the other ranks' spans are children of the first's.",
)
QUEUE: Final = _span("hicache.queue", "Waiting: queueing to admission (one for each attempt).")
MATCH: Final = _span("hicache.match", "The radix cache's answer that the admission was built on (a moment).")
PREFETCH: Final = _span("hicache.prefetch", "A prefetch from storage (L3) into host memory (L2).")
LOAD_BACK: Final = _span(
    "hicache.load_back",
    "A copy from L2 to L1 for the request, from its queueing to its completion; "
    "or the decision to make none (a moment).",
)
PREFILL: Final = _span("hicache.prefill", "One forward pass over prompt tokens, from its launch to its result.")

# --- spans: a trace per process and epoch --------------------------------------------------------------

EPOCH: Final = _span("hicache.epoch", "The time between two resets (start, flush) of a process's cache.")
EVICTION: Final = _span("hicache.eviction", "One eviction from L1.")
VICTIM: Final = _span("hicache.eviction.victim", "One radix node that an eviction took (a moment).")
HOST_EVICTION: Final = _span("hicache.host_eviction", "One eviction from L2 (the moment at which it ended).")
BACKUP: Final = _span(
    "hicache.backup", "A copy of one radix node from L1 to L2, from its queueing to its acknowledgement."
)
BACKUP_REJECTED: Final = _span(
    "hicache.backup.rejected", "No host slots could be had for a copy of a node to L2 (a moment)."
)
RESIDENCY_L1: Final = _span("hicache.residency.l1", "The time in which L1 held a usable copy of a token range.")
RESIDENCY_L2: Final = _span(
    "hicache.residency.l2", "The time in which L2 held a usable copy of a token range, from the copy's acknowledgement."
)

# --- events --------------------------------------------------------------------------------------------

ADMITTED: Final = _event("hicache.admitted", "The request got into the next batch.")
FIRST_TOKEN: Final = _event("hicache.first_token", "The result with the first output token was processed.")
RETRACTED: Final = _event("hicache.retracted", "The request lost its place and was queued again.")
TRANSFER_STARTED: Final = _event("hicache.transfer.started", "The copy was launched, perhaps merged with others.")
FLUSH: Final = _event("hicache.flush", "The whole cache was reset; what it held is gone.")
STORAGE_CHANGED: Final = _event(
    "hicache.storage.changed", "The storage backend was attached or detached on this rank, or that was refused."
)
RANGE: Final = _event("kvwitness.range", "The verdict about one token range of the request.")

# --- link relations ------------------------------------------------------------------------------------

READ_FROM: Final = _relation("read_from", "load-back → the L2 residency that it read.")
WRITTEN_BY: Final = _relation("written_by", "load-back, L2 residency → the backup or prefetch that wrote the copy.")
MADE_NECESSARY_BY: Final = _relation(
    "made_necessary_by", "load-back → the eviction's victim, whose range it brought back."
)
CAUSED_BY: Final = _relation(
    "caused_by", "eviction, host eviction, backup, rejected backup → the request that it was made for."
)
DISPLACED: Final = _relation("displaced", "host eviction → an L2 residency that it ended, in order.")
MADE_BY: Final = _relation("made_by", "L1 residency → the request that computed it, or the load-back that brought it.")
ENDED_BY: Final = _relation("ended_by", "L1 residency → the eviction's victim that ended it.")
BORN_BY: Final = _relation("born_by", "request → the earlier request whose prefix it reused.")
LOADED_BY: Final = _relation("loaded_by", "request → the earlier load-back that had brought the reused prefix into L1.")

# --- attributes: OpenTelemetry's -----------------------------------------------------------------------

GEN_AI_OPERATION: Final = _attribute(
    "gen_ai.operation.name",
    "string",
    "",
    "`text_completion`: a scheduler sees token sequences, not which endpoint was called.",
)
GEN_AI_PROVIDER: Final = _attribute("gen_ai.provider.name", "string", "", "`sglang`.")
GEN_AI_MODEL: Final = _attribute(
    "gen_ai.request.model", "string", "", "The served model's name; of a model given as a path, the last part."
)
GEN_AI_INPUT: Final = _attribute("gen_ai.usage.input_tokens", "int", "{token}", "Prompt tokens, cached ones included.")
GEN_AI_OUTPUT: Final = _attribute("gen_ai.usage.output_tokens", "int", "{token}", "Output tokens.")
GEN_AI_CACHE_READ: Final = _attribute(
    "gen_ai.usage.cache_read.input_tokens",
    "int",
    "{token}",
    "Prompt tokens read from L1, L2 and L3 together, by the verdict (`kvwitness.verdict.grade` says how far proven).",
)

# --- attributes: the request and its verdict -----------------------------------------------------------

RID: Final = _attribute("kvwitness.rid", "string", "", "SGLang's id of the request.")
ATTEMPT: Final = _attribute("kvwitness.attempt", "int", "{attempt}", "1, and one more after each retraction.")
STATE: Final = _attribute("kvwitness.release.state", "string", "", "`finished`, `aborted` or `retracted`.")
CONTINUED: Final = _attribute("kvwitness.trace.continued", "boolean", "", "The trace is the client's.")
SAMPLED: Final = _attribute(
    "kvwitness.trace.client_sampled", "boolean", "", "The client's sampled flag. The spans are made either way."
)
GRADE: Final = _attribute("kvwitness.verdict.grade", "string", "", "How far the reuse is proven (evidence model).")
REASON: Final = _attribute("kvwitness.verdict.reason", "string", "", "The reason, of a closed list (evidence model).")
TIER: Final = _attribute(
    "kvwitness.verdict.tier", "string", "", "The lowest tier that was read: `L1`, `L2`, `L3`, `recomputed`, `unknown`."
)
SENTENCE: Final = _attribute("kvwitness.verdict.sentence", "string", "", "The verdict in words.")
VERDICT_INSTANCE: Final = _attribute(
    "kvwitness.verdict.instance", "string", "", "The process whose evidence is the weakest and decides."
)
TOKENS_L1: Final = _attribute("kvwitness.tokens.l1", "int", "{token}", "Prompt tokens served from GPU memory.")
TOKENS_L2: Final = _attribute("kvwitness.tokens.l2", "int", "{token}", "Prompt tokens served from host memory.")
TOKENS_L3: Final = _attribute("kvwitness.tokens.l3", "int", "{token}", "Prompt tokens served from storage.")
TOKENS_RECOMPUTED: Final = _attribute(
    "kvwitness.tokens.recomputed", "int", "{token}", "Prompt tokens that were computed."
)
TOKENS_UNKNOWN: Final = _attribute("kvwitness.tokens.unknown", "int", "{token}", "Prompt tokens of unknown origin.")
RANGE_START: Final = _attribute("kvwitness.range.start", "int", "{token}", "First token of the judged range.")
RANGE_END: Final = _attribute("kvwitness.range.end", "int", "{token}", "Token after the judged range.")
RANGE_TIER: Final = _attribute("kvwitness.range.tier", "string", "", "The tier that served the range.")
RANGE_GRADE: Final = _attribute("kvwitness.range.grade", "string", "", "How far that is proven.")
RANGE_REASON: Final = _attribute("kvwitness.range.reason", "string", "", "The range's reason.")
RANGE_DETAIL: Final = _attribute("kvwitness.range.detail", "string", "", "The same in words.")
RANGE_MISSING: Final = _attribute(
    "kvwitness.range.missing_links", "string[]", "", "The links of the chain that do not hold."
)
RANGE_PAGES: Final = _attribute(
    "kvwitness.range.pages", "int", "{page}", "Pages of a range whose content was compared."
)
RANGE_COMPARED: Final = _attribute(
    "kvwitness.range.pages_compared", "int", "{page}", "Of these, pages whose bytes were compared, and equal."
)
SERVER_TOTAL: Final = _attribute(
    "sglang.cached_tokens.total", "int", "{token}", "Cached tokens by the server's own account."
)
SERVER_DEVICE: Final = _attribute("sglang.cached_tokens.device", "int", "{token}", "Of these, from GPU memory.")
SERVER_HOST: Final = _attribute("sglang.cached_tokens.host", "int", "{token}", "Of these, from host memory.")
SERVER_STORAGE: Final = _attribute("sglang.cached_tokens.storage", "int", "{token}", "Of these, from storage.")

# --- attributes: evidence ------------------------------------------------------------------------------

EPOCH_INDEX: Final = _attribute("kvwitness.epoch", "int", "{epoch}", "Number of the epoch within the process.")
FIRST_SEQ: Final = _attribute(
    "kvwitness.journal.first_seq", "int", "{event}", "Journal event with which the span begins."
)
LAST_SEQ: Final = _attribute(
    "kvwitness.journal.last_seq", "int", "{event}", "Journal event with which it ends, when recorded."
)
GAPS: Final = _attribute(
    "kvwitness.journal.gaps", "int", "{gap}", "Places where events are missing or contradict each other."
)
ANOMALIES: Final = _attribute("kvwitness.journal.anomalies", "int", "{anomaly}", "What is wrong with the journal file.")
OPEN: Final = _attribute(
    "kvwitness.open", "boolean", "", "True: the end was not recorded, and the span ends with the last event instead."
)
RELATION: Final = _attribute("kvwitness.link.relation", "string", "", "On links: one of the relations above.")

# --- attributes: what the cache did --------------------------------------------------------------------

START: Final = _attribute(
    "hicache.tokens.start", "int", "{token}", "First token position of the range, from the prompt's start."
)
END: Final = _attribute("hicache.tokens.end", "int", "{token}", "Token position after the range.")
COUNT: Final = _attribute(
    "hicache.tokens.count", "int", "{token}", "Tokens that were copied, held, computed or evicted."
)
NODE: Final = _attribute("hicache.node.id", "int", "", "Radix node; a number means nothing outside its epoch.")
OWNER: Final = _attribute("hicache.owner.rid", "string", "", "The request whose prefix it is, or `at attach, node N`.")
SLOTS: Final = _attribute(
    "hicache.host_slots.ranges", "string[]", "", "Host slots as half-open ranges `first..after`; at most 64 of them."
)
SLOT_RANGES: Final = _attribute("hicache.host_slots.range_count", "int", "{range}", "How many ranges there are.")
MATCH_DEVICE: Final = _attribute("hicache.match.device_tokens", "int", "{token}", "Tokens matched in L1.")
MATCH_HOST: Final = _attribute("hicache.match.host_tokens", "int", "{token}", "Tokens beyond them that L2 promised.")
MATCH_NODES: Final = _attribute("hicache.match.nodes", "int", "{node}", "Radix nodes on the matched path.")
PROMISED: Final = _attribute(
    "hicache.load_back.promised_tokens", "int", "{token}", "Tokens that the match promised from L2."
)
WANTED: Final = _attribute(
    "hicache.load_back.wanted_tokens", "int", "{token}", "Tokens that the tree would have copied."
)
LOADED: Final = _attribute(
    "hicache.load_back.loaded_tokens", "int", "{token}", "Tokens that the decision counted as loaded."
)
DECLINED: Final = _attribute(
    "hicache.load_back.declined", "boolean", "", "Nothing was loaded although it was promised."
)
REFUSAL: Final = _attribute("hicache.load_back.refusal", "string", "", "Why nothing was loaded.")
FREED_MEANWHILE: Final = _attribute(
    "hicache.load_back.freed_while_loading", "boolean", "", "Host slots were given back before the copy was complete."
)
TRANSFER: Final = _attribute("hicache.transfer.id", "int", "", "The copy as the controller numbers it.")
TRANSFER_TOKENS: Final = _attribute(
    "hicache.transfer.tokens", "int", "{token}", "Tokens of the whole, perhaps merged, copy."
)
TRANSFER_BYTES: Final = _attribute(
    "hicache.transfer.bytes", "int", "By", "Bytes of the whole copy, as the controller counts them."
)
TRANSFER_DURATION: Final = _attribute(
    "hicache.transfer.device_duration",
    "double",
    "s",
    "Between the device events around the copy, where the device has them.",
)
BATCH: Final = _attribute("hicache.prefill.batch", "int", "", "Number of the batch.")
LAST_CHUNK: Final = _attribute("hicache.prefill.last", "boolean", "", "The last chunk of the prompt.")
PREFETCH_COMPLETED: Final = _attribute(
    "hicache.prefetch.completed_tokens", "int", "{token}", "Tokens that storage delivered."
)
PREFETCH_EXISTING: Final = _attribute("hicache.prefetch.existing_tokens", "int", "{token}", "Of these, in L2 already.")
PREFETCH_LOADED: Final = _attribute("hicache.prefetch.loaded_tokens", "int", "{token}", "Of these, new in L2.")
PREFETCH_DEADLINE: Final = _attribute("hicache.prefetch.deadline", "boolean", "", "Cut short by the prefetch policy.")
STORAGE_ATTACH: Final = _attribute("hicache.storage.attach", "boolean", "", "Attached; false: detached.")
STORAGE_DONE: Final = _attribute("hicache.storage.done", "boolean", "", "It took effect on this rank; false: refused.")
STORAGE_MESSAGE: Final = _attribute("hicache.storage.message", "string", "", "What SGLang answered.")
EVICTION_CALL: Final = _attribute("hicache.eviction.call", "int", "", "Number of the eviction within the process.")
EVICTION_CAUSE: Final = _attribute("hicache.eviction.cause", "string", "", "What needed room.")
EVICTION_ASKED: Final = _attribute("hicache.eviction.asked_tokens", "int", "{token}", "Tokens that were to be freed.")
EVICTION_FREED: Final = _attribute("hicache.eviction.freed_tokens", "int", "{token}", "Tokens that were freed.")
EVICTION_FREE: Final = _attribute(
    "hicache.eviction.free_tokens",
    "int",
    "{token}",
    "Tokens that were free in the tier before.",
)
EVICTION_RIDS: Final = _attribute(
    "hicache.eviction.rids", "string[]", "", "The requests whose allocation forced it; a whole batch at times."
)
EVICTION_VICTIMS: Final = _attribute("hicache.eviction.victims", "int", "{node}", "Nodes that were taken.")
EVICTION_OUTCOME: Final = _attribute("hicache.eviction.outcome", "string", "", "What became of the node.")
WRITE_BACK: Final = _attribute("hicache.backup.write_back", "boolean", "", "Written back during an eviction.")
PAGE_SIZE: Final = _attribute("hicache.page_size", "int", "{token}", "Tokens of a page.")
CAPACITY_L1: Final = _attribute("hicache.l1.capacity", "int", "{token}", "Size of the GPU pool.")
CAPACITY_L2: Final = _attribute("hicache.l2.capacity", "int", "{token}", "Size of the host pool.")
WRITE_POLICY: Final = _attribute("hicache.write_policy", "string", "", "When L1 is copied to L2.")

# --- resource ------------------------------------------------------------------------------------------

SERVICE_NAME: Final = _resource("service.name", "string", "`sglang`.")
SERVICE_INSTANCE: Final = _resource("service.instance.id", "string", "The scheduler process, as its journal is named.")
SERVICE_VERSION: Final = _resource("service.version", "string", "SGLang's version.")
SGLANG_VERSION: Final = _resource("sglang.version", "string", "The same, for queries by this name.")
PROCESS_PID: Final = _resource("process.pid", "int", "Of the scheduler process.")
HOST_NAME: Final = _resource("host.name", "string", "The machine; not in bundles, which keep it in `environment.json`.")
TP_RANK: Final = _resource("sglang.tp.rank", "int", "Tensor-parallel rank.")
TP_SIZE: Final = _resource("sglang.tp.size", "int", "Tensor-parallel size.")
PP_RANK: Final = _resource("sglang.pp.rank", "int", "Pipeline-parallel rank.")
PP_SIZE: Final = _resource("sglang.pp.size", "int", "Pipeline-parallel size.")
DP_RANK: Final = _resource("sglang.dp.rank", "int", "Data-parallel rank.")
DP_SIZE: Final = _resource("sglang.dp.size", "int", "Data-parallel size.")
