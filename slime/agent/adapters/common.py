"""The base of all wire protocols: sessions, the path of a turn to the engine and back, and its record.

    request -> session -> messages -> token ids -> engine -> text, tool calls -> answer sent -> turn recorded

    Waits: a client waits for the engine (``request_timeout_s``). ``finish_session`` waits for the running turns
    (``wait_timeout``), then cancels them.

A subclass translates: see the hooks of :class:`BaseAdapter`. The engine may be a server or the router.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from argparse import Namespace
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, ClassVar

from aiohttp import web

from slime.agent.adapters.generation import DEFAULT_SID, EngineAborted, SamplingRefused, Session, call_sglang_generate
from slime.agent.adapters.wire import (
    Dialect,
    Reply,
    error_reply,
    flatten_content,
    health,
    is_from_here,
    manager_finish_reason,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
)
from slime.agent.parsing import END_OF_THOUGHT, parse_model_output
from slime.agent.rendering import TurnRenderer, history
from slime.agent.trajectory import Message, RewardSplit, TrajectoryManager, TurnRecord
from slime.data.sample import Sample
from slime.observability.trace_utils import TraceHandle
from slime.rollout.base_types import complete_args
from slime.rollout.direct_engines import DirectEngines
from slime.rollout.engine_request import cut_stop_token
from slime.utils.errors import EngineError
from slime.utils.http_utils import close_http_client

__all__ = [
    "BaseAdapter",
    "EngineAborted",
    "Reply",
    "Session",
    "TurnRecord",
    "call_sglang_generate",
    "flatten_content",
    "manager_finish_reason",
    "sid_from_bearer",
    "sid_from_body",
    "tool_call_dict",
]

logger = logging.getLogger(__name__)

# The default of aiohttp, 1 MiB, is too small for conversations with tool output.
MAX_BODY_BYTES = 64 << 20
DEFAULT_REQUEST_TIMEOUT_S = 3600.0
# Sessions without a turn for this time are forgotten when another session begins.
MAX_IDLE_S = 6 * 3600.0
_CANCEL_TIMEOUT_S = 5.0
_MAX_CLOSED = 100_000

DebugCallback = Callable[[str, list[Message], list[dict[str, Any]] | None, Message, TurnRecord], None]


class _Closed(OrderedDict[str, None]):
    """The ids of the last ``_MAX_CLOSED`` closed sessions."""

    def add(self, sid: str) -> None:
        self[sid] = None
        if len(self) > _MAX_CLOSED:
            self.popitem(last=False)

    def discard(self, sid: str) -> None:
        self.pop(sid, None)


class BaseAdapter(Dialect):
    """An HTTP application for agents, and their sessions.

    Args:
        tokenizer: of the served model.
        sglang_url: ``http://host:port`` of an engine or router.
        tool_parser, reasoning_parser: names of SGLang's parsers. None: the XML form and ``</think>``.
        max_turns_per_sid: further turns are answered with 429.
        fork_threshold_tokens, reward_split: see :class:`TrajectoryManager`.
        args: the run's arguments. They decide which data of the engines the trainer needs: the ids that the vocabulary
            was cut to (``--rollout-top-p``, ``--rollout-top-k``; without ``args`` the sampling defaults of the sessions
            decide), and the chosen experts (``--use-rollout-routing-replay``).
        debug_callback: ``(sid, messages, tools, manager_message, turn)``, after every answered turn.
        client_sampling: whether clients may set temperature, top_p and top_k. Off: their values are ignored,
            because other sampling makes training off-policy. On: top_p and top_k are still refused if the run does not
            cut the vocabulary, because the trainer would not know the cut.
        needs_session: whether sessions must be opened first. False: a turn with an unknown id opens one.
            None: such a turn opens one over loopback only.
        request_timeout_s: seconds for the engine's reply.
        request_options: added to the body of every ``/generate``. Requests with fields that the router drops go past
            it, to the engines that it lists.
    """

    logger: ClassVar[logging.Logger] = logger
    log_prefix: ClassVar[str] = "adapter"
    max_token_keys: ClassVar[tuple[str, ...]] = ()
    stop_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: DebugCallback | None = None,
        reward_split: RewardSplit = "full",
        args: Any = None,
        client_sampling: bool = False,
        needs_session: bool | None = None,
        request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S,
        request_options: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.sglang_url = sglang_url.rstrip("/")
        self.engines = DirectEngines(self.sglang_url)
        self.args = args
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.max_turns_per_sid = max_turns_per_sid
        self.debug_callback = debug_callback
        self.client_sampling = client_sampling
        self.needs_session = needs_session
        self.request_timeout_s = request_timeout_s
        self.request_options = dict(request_options or {})
        self.manager = TrajectoryManager(
            fork_threshold_tokens=fork_threshold_tokens, reward_split=reward_split, args=args
        )
        self.store: dict[str, Session] = {}
        self.inflight: dict[str, set[asyncio.Task[Any]]] = {}
        self.closed = _Closed()
        self._ignored_keys: set[str] = set()
        self._renderer = TurnRenderer(tokenizer)
        self._reasons: set[str] = set()
        self.app = web.Application(client_max_size=MAX_BODY_BYTES)
        self.app.router.add_get("/healthz", health)
        self.app.router.add_get("/v1/models", health)
        self.app.cleanup_ctx.append(_http_clients)
        self._register_routes(self.app)

    # --- hooks of a protocol -----------------------------------------------------------------------------------------

    @abstractmethod
    def _register_routes(self, app: web.Application) -> None:
        """Add the routes of the protocol. :meth:`_run_turn` answers turns."""

    def _session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        return sid_from_bearer(request) or sid_from_body(body) or DEFAULT_SID

    def _preprocess_body(self, body: dict[str, Any]) -> None:  # most protocols need nothing
        """Change a request's body in place before anything reads it."""

    def _dialect(self, request: web.Request, session: Session) -> Dialect:
        """The protocol of a request, for adapters that speak several."""
        return self

    # --- sessions ----------------------------------------------------------------------------------------------------

    def open_session(
        self,
        sid: str,
        *,
        sampling_defaults: dict[str, Any] | None = None,
        max_context_tokens: int = 0,
        trace: TraceHandle | None = None,
    ) -> None:
        """Accept turns under ``sid``. The id is the client's only credential: make it hard to guess.

        Args:
            trace: gets a span for each turn, and requests to engines continue it.

        Raises:
            ValueError: there is such a session.
        """
        if sid in self.store:
            raise ValueError(f"session {sid!r} is open already")
        self.closed.discard(sid)
        self._enter(sid, Session(dict(sampling_defaults or {}), max_context_tokens, trace=trace))

    def _enter(self, sid: str, session: Session) -> None:
        for idle in self.manager.drop_idle(MAX_IDLE_S):
            self._forget(idle)
        self.store[sid] = session

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Refuse further turns, wait for those under way, then cancel them. May be called from any event loop."""
        # First: no turn may begin while those under way are awaited.
        self.closed.add(sid)
        # Copied first: the adapter's loop may run on another thread and add or remove tasks meanwhile.
        tasks = [task for task in list(self.inflight.get(sid, ())) if not task.done()]
        if not tasks:
            return
        loop = tasks[0].get_loop()
        if loop is asyncio.get_running_loop():
            await _wait_then_cancel(tasks, wait_timeout)
        else:
            future = asyncio.run_coroutine_threadsafe(_wait_then_cancel(tasks, wait_timeout), loop)
            await asyncio.wrap_future(future)

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: Any = 0.0,
        extra_metadata: dict[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """End a session. Returns its samples with decoded responses, or [] without a turn or in a second call.

        The stop token of the last turn is not part of the text (``slime.rollout.engine_request``).
        """
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        session = self.store.get(sid, Session())
        samples = self.manager.get_trajectory(
            sid,
            base_sample=base_sample,
            reward=reward,
            extra_metadata=extra_metadata,
            max_sample_tokens=session.max_context_tokens,
        )
        self._forget(sid)
        for sample in samples:
            ids = sample.tokens[len(sample.tokens) - sample.response_length :]
            sample.response = self.tokenizer.decode(ids, skip_special_tokens=False)
        args = complete_args(Namespace() if self.args is None else self.args)
        if not args.keep_stop_token_text:
            cut_stop_token(args.hf_checkpoint, samples, session.sampling_defaults, self.tokenizer)
        return samples

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """End a session and forget its turns."""
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        self._forget(sid)

    def _forget(self, sid: str) -> None:
        self.manager.drop_session(sid)
        self.store.pop(sid, None)

    # --- one turn ----------------------------------------------------------------------------------------------------

    async def _run_turn(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError("the body must be a JSON object")
            self._preprocess_body(body)
            sid = self._session_id(request, body)
            refusal = self._refusal(request, sid)
            if refusal is not None:
                return refusal
            session = self.store.get(sid) or Session()
            dialect = self._dialect(request, session)
            offered = body.get("tools") or []
            if not isinstance(offered, list) or not all(isinstance(tool, dict) for tool in offered):
                raise ValueError("tools must be a list of objects")
            messages, tools = dialect._translate(body)
        except ValueError as error:  # json.JSONDecodeError is one
            return error_reply(400, "invalid_request_error", str(error))
        # Before the answer: turns that fail count against the limit too.
        session.num_accepted += 1
        if sid not in self.store:
            self._enter(sid, session)
        task = asyncio.current_task()
        assert task is not None
        self.inflight.setdefault(sid, set()).add(task)
        try:
            return await self._answer(request, body, sid, session, dialect, messages, tools)
        except SamplingRefused as error:
            return error_reply(400, "invalid_request_error", str(error))
        # The engine aborts when weights change or the rollout ends. The turn is not recorded, because a cut text must
        # not look like the end of a message.
        except EngineAborted as error:
            return error_reply(503, "overloaded_error", str(error))
        except (EngineError, TimeoutError) as error:
            self.logger.warning("%s %s: %s", self.log_prefix, sid, error)
            return error_reply(502, "api_error", str(error))
        finally:
            running = self.inflight[sid]
            running.discard(task)
            if not running:
                del self.inflight[sid]

    def _refusal(self, request: web.Request, sid: str) -> web.Response | None:
        if sid in self.closed:
            return error_reply(503, "overloaded_error", "session closed")
        needs_session = not is_from_here(request) if self.needs_session is None else self.needs_session
        if needs_session and sid not in self.store:
            return error_reply(401, "authentication_error", "there is no such session")
        num_accepted = self.store[sid].num_accepted if sid in self.store else 0
        if self.max_turns_per_sid is not None and num_accepted >= self.max_turns_per_sid:
            return error_reply(429, "rate_limit_error", f"the session has had its {self.max_turns_per_sid} turns")
        return None

    async def _answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        sid: str,
        session: Session,
        dialect: Dialect,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
    ) -> web.StreamResponse:
        held = history(self.manager.path(sid, messages))
        if held and (last := held[-1][1]) is not None and last.tools == tools:
            tools = last.tools  # one copy for all turns, which are kept until the session ends
        # In a thread, because rendering a long conversation would delay the turns of all other sessions.
        prompt_ids, reason = await asyncio.to_thread(self._renderer.prompt_ids, messages, tools, held)
        self._note_rendered_whole(reason)
        turn = await call_sglang_generate(prompt_ids, session, body, adapter=self, session_id=sid)
        text = self.tokenizer.decode(turn.output_ids, skip_special_tokens=False)
        parsed = parse_model_output(
            _without_end(text, self.tokenizer),
            tools_schema=tools,
            tool_parser_name=self.tool_parser,
            reasoning_parser_name=self.reasoning_parser,
        )
        reply = dialect._build_reply(parsed, turn.finish_reason, messages, tools)
        reply.cached_tokens = int((turn.meta_info or {}).get("cached_tokens") or 0)
        turn = replace(
            turn,
            ill_formed=parsed.ill_formed,
            has_thoughts=bool(parsed.reasoning) or END_OF_THOUGHT in text,
            tools=tools,
            is_shown=len(reply.manager_message.get("tool_calls") or ()) == len(parsed.tool_uses),
            rendered_whole=reason,
        )
        stream = body.get("stream") is True or "text/event-stream" in request.headers.get("Accept", "")
        try:
            response = await dialect._respond(request, body, reply, len(prompt_ids), len(turn.output_ids), stream)
        except ConnectionError:
            return web.Response(status=499)  # the client did not read the reply, so the turn is not recorded
        if self.debug_callback is not None:
            self.debug_callback(sid, messages, tools, reply.manager_message, turn)
        self.manager.record_turn(
            sid, turn=turn, prompt_messages=messages, response_message=reply.manager_message, metadata={"sid": sid}
        )
        return response

    def _note_rendered_whole(self, reason: str) -> None:
        if reason and reason not in self._reasons:
            self._reasons.add(reason)
            self.logger.warning(
                "%s: %s, so such a turn renders its whole conversation. Samples count these turns in metadata"
                '["rendered_whole"]',
                *(self.log_prefix, reason),
            )

    def note_ignored(self, key: str) -> None:
        """Warn once that a client's sampling parameter has no effect."""
        if key not in self._ignored_keys:
            self._ignored_keys.add(key)
            self.logger.warning(
                "%s: clients set %s, which is ignored: samples must be drawn as the rollout says", self.log_prefix, key
            )


async def _wait_then_cancel(tasks: list[asyncio.Task[Any]], wait_timeout: float) -> None:
    _, running = await asyncio.wait(tasks, timeout=wait_timeout)
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=_CANCEL_TIMEOUT_S)


async def _http_clients(app: web.Application) -> AsyncIterator[None]:
    yield
    # The client belongs to this event loop, so it is closed when the server ends.
    await close_http_client()


def _without_end(text: str, tokenizer: Any) -> str:
    """The end token is part of the sample and not of the message."""
    end = tokenizer.eos_token
    return text.removesuffix(end) if end else text
