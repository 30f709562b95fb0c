"""How well a head drafts: question sets, acceptance figures, speed beside plain decoding, reports.

Every figure is pooled over rounds, prompts and turns; none is a mean of means. Both ways of decoding answer
the same prompts in turn, so that whatever else the machine does hits both.
"""
