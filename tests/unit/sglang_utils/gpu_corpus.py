"""Send earlier responses to two ranks of an engine on a GPU, and print what each drafts in the step after it.

The manager of corpora, the n-grams and the hooks are the real ones. Of NGRAMWorker, which needs CUDA to be imported,
only the two methods exist that the manager calls. Runs in its own process, because the n-grams have a thread.
"""

import asyncio
from types import SimpleNamespace

from sglang.srt import runtime_context
from sglang.srt.managers.io_struct import AddExternalCorpusReqInput
from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus
from sglang.srt.speculative.external_corpus_manager import ExternalCorpusManager

from slime.backends.sglang_utils.cpu_platform.hooks import add_tokens, load_at_once
from slime.data.sample import Sample
from slime.rollout.prompt_history import DraftHistory, prompt_key
from slime.utils import accelerator


class Rank:
    def __init__(self) -> None:
        self.ngrams = NgramCorpus(max_trie_depth=12, draft_token_num=6, capacity=100, external_sam_budget=3)
        self.add_external_corpus = self.ngrams.load_external_corpus_named
        self.commit_corpus_load = self.ngrams.commit_external_corpus_load
        self.replies = []
        self.manager = ExternalCorpusManager(self, lambda reply, request: self.replies.append(reply))


ranks = [Rank(), Rank()]


async def send(request):
    for rank in ranks:
        load_at_once(rank.manager.add(request), rank.manager)
        print("draft", *rank.ngrams.batch_get(["r"], [[1, 2, 10]], [3])[0])
    return [rank.replies[-1] for rank in ranks]


async def original(manager, request):
    return "SGLang's"


def call(chunks, budget=3, deterministic=False):
    runtime_context.get_spec = lambda: SimpleNamespace(
        speculative_algorithm="NGRAM", speculative_ngram_external_sam_budget=budget, speculative_num_draft_tokens=6
    )
    manager = SimpleNamespace(
        server_args=SimpleNamespace(enable_deterministic_inference=deterministic),
        auto_create_handle_loop=lambda: None,
        add_external_corpus_communicator=send,
    )
    return asyncio.run(add_tokens(original, manager, AddExternalCorpusReqInput(corpus_id="slime", token_chunks=chunks)))


accelerator.current = lambda: SimpleNamespace(is_cpu=False)
sample = Sample(prompt="a", tokens=[1, 2, *range(10, 1998)], response_length=1988, status=Sample.Status.COMPLETED)
history = DraftHistory()
history.remember([sample])
chunks = history.corpus([prompt_key(sample)], 10000)
print(call(None))
for options in ({"budget": 0}, {"deterministic": True}, {}, {}):
    reply = call(chunks, **options)
    print(reply.success, reply.loaded_token_count, reply.message)
