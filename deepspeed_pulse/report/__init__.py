"""Pictures, tables and traces of plans and timelines. Loaded only when one is asked for.

Terminal output needs rich, pictures need matplotlib; nothing here needs torch or deepspeed.
"""
