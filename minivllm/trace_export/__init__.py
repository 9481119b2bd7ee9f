"""A recorded run in the formats of other tools: Perfetto, Jaeger, OTLP, and one self-contained page.

vLLM 0.25.1: none
Articles: –
"""
