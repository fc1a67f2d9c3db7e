"""External agents as data generators: they use OpenAI or Anthropic HTTP, and their turns become loss-masked samples.

    agent program ──HTTP──▶ adapters ──/generate──▶ engines        sandbox, harness: the place of the program
                               │ exact token ids, log-probs
                               ▼
                          trajectory ──▶ list[Sample]

Called by users' custom generate functions. Knows no trainer and no Ray. Imports SGLang only to parse tool calls, and
only when a parser is named.
"""
