"""Any model as a layer list: its own forward, run once without numbers, is cut between its blocks.

outline     which modules are kept whole
batch       the example that the model is run with
standins    a model and a batch without numbers
recording   what the model's forward calls, alike: what leaves of one build give, built: how a leaf is built
keeping     what leaves gave, kept in a folder; content: what that depends on; expressions: sizes as plain data
glue        functions of the model's code that are kept whole
trying      what leaves and glue give that look at numbers
tracing     one run, and what it takes for given
cutting     where the calls are cut, and what goes from layer to layer
code        a layer's calls, played again
layers      the layer list; other traces for other sizes, modes and dtypes
"""
