"""Checks of ``slime doctor engine`` on answers: an engine's ``/generate`` against transformers.

Every check is a function from a :class:`Trial` to findings, one line each. A finding of a failure names the defect if
its figures show which one it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slime.backends.sglang_utils.engine import SGLangEngine
from slime.data.engine_fields import REPLAY_TOP_K, SAMPLING_MASK, sampled_tokens
from slime.data.engine_meta import decode_int32_meta_array
from slime.data.processing import encode_image_for_rollout_engine
from slime.doctor import Finding, fail, ok, skip, warn
from slime.doctor.engine_golden import Golden, Picture, chosen

_NEW = 16  # tokens of a response
_NUM_DRAWS = 1000  # enough to see that one token of ten is missing
# A right engine fails the test of frequencies once in this many runs. The engine's seed is fixed as well.
_RARE = 1e-9
_LEAST_EXPECTED = 5.0  # draws in a bin of the chi-square test
_ENTROPY = math.log(10)
_WINS = 1000.0  # a logit that no other reaches


@dataclass
class Trial:
    """An engine that serves the checkpoint of ``golden``, and nothing else meanwhile.

    Attributes:
        server: every field of ``/server_info``.
        shares_memory: this process and the engine's ranks are on one host.
    """

    engine: SGLangEngine
    golden: Golden
    server: Mapping[str, Any] = field(default_factory=dict)
    shares_memory: bool = True

    def ask(
        self, prompts: Sequence[Sequence[int]], fields: Mapping[str, Any] | None = None, **params: Any
    ) -> list[Any]:
        """One request with all prompts. ``params``: sampling parameters, a greedy response of any text by default."""
        chosen = {"max_new_tokens": _NEW, "temperature": 0.0, "ignore_eos": True} | params
        body = {"input_ids": [list(ids) for ids in prompts], "sampling_params": chosen, "return_logprob": True}
        return [Answer(ids, reply) for ids, reply in zip(prompts, self._post(body, fields), strict=True)]

    def ask_about(self, picture: Picture, **params: Any) -> Answer:
        """The same for one prompt with an image."""
        chosen = {"max_new_tokens": _NEW, "temperature": 0.0, "ignore_eos": True} | params
        images = {"image_data": [encode_image_for_rollout_engine(picture.image)]}
        body = {"text": picture.text, "sampling_params": chosen, "return_logprob": True}
        return Answer(picture.ids, self._post(body, images)[0])

    def _post(self, body: Mapping[str, Any], fields: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        return self.engine.generate({**body, **(fields or {})})

    def agreement(self, what: str, differences: torch.Tensor, fix: str) -> Finding:
        """Judge differences of log-probs by the engine's precision."""
        rule, found = self.golden.precision, differences.abs().double()
        largest, median = float(found.max()), float(found.median())
        value = f"differ by at most {largest:.2g}, median {median:.2g}, {len(found)} log-probs"
        if largest <= rule.most and median <= rule.median:  # false for NaN
            return ok(what, value)
        limits = f"allowed in {str(self.golden.dtype).removeprefix('torch.')}: {rule.most:g}, median {rule.median:g}"
        return fail(what, f"{value} ({limits})", fix)

    def agrees(self, differences: torch.Tensor) -> bool:
        return self.agreement("", differences, "").status == "ok"


class Answer:
    """One reply of ``/generate`` to the prompt ``prompt``."""

    def __init__(self, prompt: Sequence[int], reply: Mapping[str, Any]) -> None:
        self.prompt = list(prompt)
        self.meta: dict[str, Any] = reply["meta_info"]
        self.ids, numbers = sampled_tokens(self.meta)
        self.log_probs = torch.tensor(numbers, dtype=torch.float64)
        self.text = str(reply.get("text", ""))
        self.finish: Mapping[str, Any] = self.meta.get("finish_reason") or {}

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.ids

    @property
    def prompt_log_probs(self) -> torch.Tensor:
        """From the second token on. NaN where the engine has none."""
        found = [math.nan if pair[0] is None else pair[0] for pair in self.meta["input_token_logprobs"][1:]]
        return torch.tensor(found, dtype=torch.float64)


def prompt_log_probs(trial: Trial) -> Iterator[Finding]:
    """Prompts of several lengths in one batch. A request's temperature does not change them."""
    golden = trial.golden
    answers = trial.ask(golden.prompts, fields={"logprob_start_len": 0}, max_new_tokens=0, temperature=0.5)
    differences, firsts = [], []
    for answer in answers:
        found = answer.prompt_log_probs
        differences.append(found - golden.log_probs(answer.prompt))
        firsts.append(differences[-1][:1])
        if trial.agrees(found - golden.log_probs(answer.prompt, temperature=0.5)):
            yield fail("log-probs of prompts", "are scaled by the temperature of the request", "score prompts at 1")
            return
    fix = "the weights, a norm, or the precision (--dtype) is not the checkpoint's"
    if trial.agrees(torch.cat(firsts)):
        fix = "the first tokens agree, later ones do not: positions (rope_theta, rope scaling) or attention"
    yield trial.agreement("log-probs of prompts", torch.cat(differences), fix)


def sampled_log_probs(trial: Trial) -> Iterator[Finding]:
    """Of sampled tokens at temperature 1, of the same prompt from the cache, and at another temperature."""
    golden = trial.golden
    answers = trial.ask(golden.prompts, temperature=1.0)
    fix = "prompts agree: decoding differs from prefill (positions, cache, batch), or log-probs are of other logits"
    yield trial.agreement("log-probs of samples", torch.cat([_difference(golden, each) for each in answers]), fix)
    longest = [answer.prompt for answer in answers if len(answer.prompt) == max(len(each.prompt) for each in answers)]
    # the first request has left its prefix in the cache
    (again,) = trial.ask(longest[:1], temperature=1.0)
    if not int(again.meta.get("cached_tokens") or 0):
        reason = "no token came from a cache (--disable-radix-cache, or --page-size above the prompt)"
        yield skip("after a cached prefix", reason)
    else:
        yield trial.agreement("after a cached prefix", _difference(golden, again), "the prefix cache is wrong")
    cold = trial.ask(golden.prompts, temperature=0.5)
    differences = torch.cat([_difference(golden, each, 0.5) for each in cold])
    fix = "the log-probs are not those of the logits divided by the temperature"
    if not trial.agrees(differences) and trial.agrees(torch.cat([_difference(golden, each) for each in cold])):
        fix = "the temperature is ignored: unset SGLANG_RETURN_ORIGINAL_LOGPROB"
    yield trial.agreement("at temperature 0.5", differences, fix)


def _difference(golden: Golden, answer: Answer, temperature: float = 1.0) -> torch.Tensor:
    return answer.log_probs - golden.log_probs(answer.tokens, len(answer.prompt), temperature)


def greedy_tokens(trial: Trial) -> Iterator[Finding]:
    """At temperature 0 every token is the most likely one."""
    short, total = 0.0, 0
    for answer in trial.ask(trial.golden.prompts):
        rows = trial.golden.logits(answer.tokens)[len(answer.prompt) - 1 : -1].log_softmax(-1)
        gaps = rows.max(-1).values - chosen(rows, answer.ids)
        short, total = max(short, float(gaps.max())), total + len(gaps)
    value = f"{total} tokens are within {short:.2g} of the most likely one"
    limit = 2 * trial.golden.precision.most
    is_right = short <= limit
    fix = f"at most {limit:g} is rounding: temperature 0 does not decode greedily"
    yield ok("greedy tokens", value) if is_right else fail("greedy tokens", value, fix)


def penalties(trial: Trial) -> Iterator[Finding]:
    """``logit_bias`` and ``frequency_penalty`` change the distribution that tokens and log-probs come from."""
    what, prompt = "bias and penalty", trial.golden.prompts[0]
    pair = trial.golden.logits(prompt)[-1].topk(2).indices.tolist()
    bias = {str(token): 50.0 for token in pair}  # so that the two tokens repeat
    (answer,) = trial.ask([prompt], temperature=1.0, frequency_penalty=0.5, logit_bias=bias)
    rows = trial.golden.logits(answer.tokens)[len(prompt) - 1 : -1].clone()
    rows[:, pair] += 50.0
    before = answer.log_probs - chosen(rows, answer.ids)
    for place, row in enumerate(rows):
        for token, number in Counter(answer.ids[:place]).items():
            row[token] -= 0.5 * number
    after = answer.log_probs - chosen(rows, answer.ids)
    # SGLang's scheduler prepares a step before the token of the last one is known. Seen in 0.5.23: that token is not
    # counted yet, and in an engine with LoRA the first one counts twice.
    if trial.agrees(after) or trial.agrees(before):
        fix = "the log-probs are those from before the penalty, or the penalty is ignored"
        yield trial.agreement(what, after, fix)
    else:
        value = (
            f"log-probs differ by at most {float(after.abs().max()):.2g} from those with every earlier token counted"
        )
        yield warn(what, value, "SGLang 0.5.23 counts tokens late, a possible cause. Training sends no penalty")


def sampling_sets(trial: Trial) -> Iterator[Finding]:
    """``return_sampling_mask``: the ids of a nucleus are those of transformers, and so are the log-probs in it."""
    for top_p, top_k in ((0.8, REPLAY_TOP_K), (1.0, 5)):
        what = f"top-p {top_p:g} sets" if top_k == REPLAY_TOP_K else f"top-k {top_k} sets"
        params: dict[str, Any] = {"temperature": 0.7, "top_p": top_p, "top_k": top_k}
        answers = trial.ask(trial.golden.prompts, fields={"return_sampling_mask": True}, **params)
        if any(SAMPLING_MASK not in answer.meta for answer in answers):
            yield fail(what, f"the reply has no {SAMPLING_MASK}", "SGLang before 0.5.20 has none: use a newer one")
            return
        wrong: list[str] = []
        differences: list[torch.Tensor] = []
        for answer in answers:
            sets = answer.meta[SAMPLING_MASK]
            logits = trial.golden.logits(answer.tokens)[len(answer.prompt) - 1 : -1] / 0.7
            for row, kept, token in zip(logits.log_softmax(-1), sets, answer.ids, strict=True):
                wrong += _set_problems(trial, row, kept, token, top_p, top_k)
                mass = row[kept].logsumexp(0) if kept else torch.tensor(0.0)
                differences.append(row[token] - mass)
        if wrong:
            most = Counter(wrong).most_common(1)[0]
            yield fail(what, f"{len(wrong)} of {len(differences)} positions: {most[0]}", "the sampler cuts elsewhere")
            continue
        reported = torch.cat([answer.log_probs for answer in answers])
        yield trial.agreement(what, reported - torch.stack(differences), "log-probs are not those of the cut softmax")


def _set_problems(
    trial: Trial, row: torch.Tensor, kept: Sequence[int], token: int, top_p: float, top_k: int
) -> Iterator[str]:
    """The difference between a set and the golden one that rounding does not explain. At most one."""
    if token not in kept:
        yield "the sampled token is not in its set"
        return
    ranked, order = row.exp().sort(descending=True)
    above = ranked.cumsum(0) - ranked  # the mass of more likely tokens
    is_kept = torch.zeros(len(row), dtype=torch.bool)
    is_kept[list(kept)] = True
    is_kept, place = is_kept[order], torch.arange(len(row))
    slack = trial.golden.precision.mass
    if top_p < 1:
        is_missing = ~is_kept & (above < top_p - slack) & (place < top_k)
        is_extra = is_kept & (above > top_p + slack)
    else:
        border = ranked[min(top_k, len(row)) - 1]
        is_missing = ~is_kept & (ranked > border * (1 + slack))
        is_extra = is_kept & ((ranked < border * (1 - slack)) | (len(kept) > top_k))
    if is_missing.any():
        yield "a token inside the nucleus is missing"
    elif is_extra.any():
        yield "a token outside of the nucleus is in the set"


def sampled_frequencies(trial: Trial) -> Iterator[Finding]:
    """Chi-square test of many draws of one token, at temperature 0.7 with top-p 0.9."""
    what = "sampled frequencies"
    rows = {
        (*ids[:end],): trial.golden.logits(ids)[end - 1] / 0.7 for ids in trial.golden.prompts for end in (2, len(ids))
    }
    prompt, row = min(rows.items(), key=lambda item: abs(_entropy(item[1]) - _ENTROPY))
    params: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": REPLAY_TOP_K, "max_new_tokens": 1}
    counts = Counter(answer.ids[0] for answer in trial.ask([prompt] * _NUM_DRAWS, **params))
    ranked, order = row.log_softmax(-1).exp().sort(descending=True)
    above = ranked.cumsum(0) - ranked
    outside = set(order[above > 0.9 + trial.golden.precision.mass].tolist())
    if lost := sum(number for token, number in counts.items() if token in outside):
        value = f"{lost} of {_NUM_DRAWS} tokens are outside of the nucleus of top-p 0.9"
        yield fail(what, value, "temperature or top-p are not those of the request")
        return
    expected = ranked * (above <= 0.9)
    expected *= _NUM_DRAWS / expected.sum()
    observed = torch.tensor([counts[token] for token in order.tolist()], dtype=torch.float64)
    is_bin = expected >= _LEAST_EXPECTED
    mine, theirs = (torch.cat([each[is_bin], each[~is_bin].sum()[None]]) for each in (expected, observed))
    if mine[-1] < _LEAST_EXPECTED:
        mine, theirs = (torch.cat([each[:-2], each[-2:].sum()[None]]) for each in (mine, theirs))
    if len(mine) < 2:
        yield skip(what, "one token has all of the probability at every prompt")
        return
    square = float(((theirs - mine) ** 2 / mine).sum())
    freedom = torch.tensor((len(mine) - 1) / 2, dtype=torch.float64)
    chance = float(torch.special.gammaincc(freedom, torch.tensor(square / 2, dtype=torch.float64)))
    value = f"chi-square {square:.1f} of {len(mine)} bins and {_NUM_DRAWS} draws, probability {chance:.2g}"
    fix = f"below {_RARE:g} is no chance: the tokens are drawn from another distribution (temperature, top-p, seed)"
    yield ok(what, value) if chance > _RARE else fail(what, value, fix)


def _entropy(logits: torch.Tensor) -> float:
    log_probs = logits.log_softmax(-1)
    return float(-(log_probs.exp() * log_probs).sum())


def stops(trial: Trial) -> Iterator[Finding]:
    """Stop ids, strings, lengths and the end-of-text token: the tokens, and the reason that is reported."""
    golden, prompt = trial.golden, trial.golden.prompts[0]
    never = {str(eos): -_WINS for eos in golden.eos_ids}
    # the penalty, so that a model that repeats itself writes different tokens
    bias: dict[str, Any] = {"ignore_eos": False, "logit_bias": never, "frequency_penalty": 2.0}
    (free,) = trial.ask([prompt], **bias)
    place = next(i for i in range(len(free.ids)) if i == len(free.ids) - 1 or (i and free.ids[i] not in free.ids[:i]))
    token = free.ids[place]
    yield _stop("stop_token_ids", trial.ask([prompt], stop_token_ids=[token], **bias)[0], token)
    yield from _stop_string(trial, prompt, free, bias)
    lengths = {number: trial.ask([prompt], max_new_tokens=number)[0] for number in (7, 0)}
    wrong = [
        f"{len(answer.ids)} tokens for max_new_tokens {number}, reason {dict(answer.finish)}"
        for number, answer in lengths.items()
        if len(answer.ids) != number or answer.finish.get("type") != "length"
    ]
    yield (
        fail("max_new_tokens", "; ".join(wrong), "exactly so many") if wrong else ok("max_new_tokens", "7 and 0 tokens")
    )
    if not golden.eos_ids:
        yield skip("end of text", "the checkpoint names no eos_token_id")
        return
    eos = golden.eos_ids[0]
    ends: dict[str, Any] = {"logit_bias": {str(eos): _WINS}, "min_new_tokens": 2, "max_new_tokens": 6}
    yield _stop("end of text", trial.ask([prompt], ignore_eos=False, **ends)[0], eos, count=3)
    (ignoring,) = trial.ask([prompt], **ends)
    value = f"{len(ignoring.ids)} of 6 tokens, reason {dict(ignoring.finish)}"
    is_right = ignoring.ids[2:] == [eos] * 4 and ignoring.finish.get("type") == "length"
    yield (
        ok("ignore_eos", value) if is_right else fail("ignore_eos", value, "the end of text must not end the response")
    )


def _stop(what: str, answer: Answer, token: int, count: int | None = None) -> Finding:
    """The response ends with ``token``, which is among its ids, and nowhere else."""
    value = f"{len(answer.ids)} tokens, reason {dict(answer.finish)}"
    is_named = answer.finish.get("type") == "stop" and answer.finish.get("matched") == token
    if not is_named:
        return fail(what, value, f"the reason must be a stop at token {token}")
    if answer.ids[-1:] != [token]:
        return fail(what, f"{value}: the stop token is not among the tokens", "slime trains on the stop token")
    if token in answer.ids[:-1] or (count is not None and len(answer.ids) != count):
        return fail(what, f"{value}: the response goes on after the stop token", "it ends with the first one")
    return ok(what, value)


def _stop_string(trial: Trial, prompt: Sequence[int], free: Answer, bias: Mapping[str, Any]) -> Iterator[Finding]:
    what, tokenizer = "stop strings", trial.golden.tokenizer
    if tokenizer is None or trial.server.get("skip_tokenizer_init"):
        yield skip(what, "the engine has no tokenizer")
        return
    words = [tokenizer.decode([token], skip_special_tokens=True) for token in free.ids]
    known = [
        i for i, word in enumerate(words) if i and word.strip() and word.isascii() and word not in "".join(words[:i])
    ]
    if not known:
        yield skip(what, f"no token of {words} is text that appears once")
        return
    word = words[known[0]]
    # the parameters of training requests: the text must be that of the tokens
    keep: dict[str, Any] = {"no_stop_trim": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
    kept, cut = (trial.ask([prompt], stop=[word], **bias, **more)[0] for more in (keep, {}))
    value = f"{len(kept.ids)} tokens, reason {dict(kept.finish)}"
    if any(each.finish.get("type") != "stop" or each.finish.get("matched") != word for each in (kept, cut)):
        yield fail(what, value, f"the reason must be a stop at {word!r}")
    elif word not in tokenizer.decode(kept.ids) or len(kept.ids) > known[0] + 1:
        yield fail(what, f"{value}: the tokens do not end with {word!r}", "slime trains on the tokens of the string")
    elif word not in kept.text or word in cut.text:
        yield fail(
            what, f"{value}: texts {kept.text!r} and {cut.text!r}", "no_stop_trim keeps the string, else it is cut"
        )
    else:
        yield ok(what, value)


def routed_experts(trial: Trial) -> Iterator[Finding]:
    """``return_routed_experts``: of prompt and response, the experts that transformers' routers choose."""
    what = "routed experts"
    prompt = max(trial.golden.prompts, key=len)
    if not trial.golden.experts(prompt):
        yield skip(what, "the model is dense")
        return
    if not trial.server.get("enable_return_routed_experts"):
        yield skip(what, "start the engine with --enable-return-routed-experts")
        return
    (answer,) = trial.ask([prompt], fields={"return_routed_experts": True}, temperature=1.0)
    flat = decode_int32_meta_array(answer.meta, "routed_experts")
    wanted = trial.golden.experts(answer.tokens[:-1])
    layers, width = trial.golden.text_config.num_hidden_layers, next(iter(wanted.values())).shape[1]
    shape = (len(answer.tokens) - 1, layers, width)
    if flat is None or flat.numel() != math.prod(shape):
        value = "none" if flat is None else f"{flat.numel()} numbers"
        yield fail(what, f"{value}, expected {shape}", "one row per token but the last, all layers")
        return
    found = flat.view(shape).sort(-1).values

    def differing(rows: torch.Tensor, numbers: Sequence[int]) -> float:
        pairs = [(rows[:, at] != wanted[layer]).any(-1) for at, layer in zip(numbers, wanted, strict=True)]
        return float(torch.stack(pairs).double().mean())

    share, limit = differing(found, list(wanted)), trial.golden.precision.flips
    value = f"{share:.2%} of {len(found) * len(wanted)} choices differ (allowed {limit:.2%})"
    if share <= limit:
        yield ok(what, value)
        return
    fix = "replay would train with other experts"
    if len(wanted) > 1 and differing(found, list(wanted)[::-1]) <= limit:
        fix = "the layers are in another order"
    elif any(differing(found.roll(by, 0), list(wanted)) < share / 4 for by in (1, -1)):
        fix = "the rows belong to the neighboring tokens"
    yield fail(what, value, fix)


def images(trial: Trial) -> Iterator[Finding]:
    """Two images with the same text: tokens of the prompt, and log-probs of the response."""
    what = "images"
    if trial.golden.processor is None:
        yield skip(what, "the checkpoint has no processor of images")
        return
    pictures = [trial.golden.picture(image) for image in _pictures()]
    answers = [trial.ask_about(picture) for picture in pictures]
    for picture, answer in zip(pictures, answers, strict=True):
        if answer.meta["prompt_tokens"] != len(picture.ids):
            value = f"the prompt has {answer.meta['prompt_tokens']} tokens, the processor makes {len(picture.ids)}"
            yield fail(what, value, "the engine resizes images differently, or drops them")
            return
    golden = [trial.golden.picture_log_probs(p, a.ids) for p, a in zip(pictures, answers, strict=True)]
    other = trial.golden.picture_log_probs(pictures[0], answers[1].ids)
    differences = torch.cat([answer.log_probs - mine for answer, mine in zip(answers, golden, strict=True)])
    fix = "the vision tower, or the positions of the image's tokens"
    are_equal = answers[0].ids == answers[1].ids and trial.agrees(answers[0].log_probs - answers[1].log_probs)
    if are_equal and not trial.agrees(golden[1] - other):
        fix = "the answers to different images are equal: the image is ignored, or comes from a cache"
    yield trial.agreement(what, differences, fix)


def _pictures() -> list[Any]:
    """Two PIL images of one size with little in common."""
    from PIL import Image

    draw = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (48, 48, 3), generator=draw, dtype=torch.uint8).numpy()
    plain = Image.new("RGB", (48, 48), (240, 240, 240))
    plain.paste((10, 20, 30), (8, 8, 40, 24))
    return [plain, Image.fromarray(noise)]


ANSWERS = {
    "log_probs": (prompt_log_probs, sampled_log_probs, greedy_tokens, penalties),
    "sampling": (sampling_sets, sampled_frequencies),
    "stops": (stops,),
    "experts": (routed_experts,),
    "images": (images,),
}
"""Section -> its checks."""
