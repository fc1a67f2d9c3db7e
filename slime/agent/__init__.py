"""External agents as data generators: they talk plain OpenAI or Anthropic HTTP, and leave loss-masked samples behind.

    agent program ──HTTP──▶ adapters ──/generate──▶ engines        sandbox, harness: where the program runs
                               │ exact token ids, log-probs
                               ▼
                          trajectory ──▶ list[Sample]

Called by users' custom generate functions. Knows no trainer and no Ray; imports SGLang only to parse tool calls, and
only when a parser is named.
"""
