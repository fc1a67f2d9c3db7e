"""Models an engine on a CPU can serve. A small registry: importing SGLang's whole one takes seconds."""
