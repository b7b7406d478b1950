"""Tracers, the two handlers through which torch calls reach them, and reads of torch's state.

Tracers and levels
    - ``tracer``: the base classes, and the handlers that find the level of a call
    - ``batch_tracer``: the level and the tracers of ``vmap``
    - ``grad_level``: those that only wrap a value, so that autograd records on them separately
    - ``nesting``, ``tracer_stack``: the values inside of a tracer, and the tracers around a value
    - ``level_proxies``: tensors as the running code must see them
    - ``attributes``, ``methods``, ``texts``: attributes, copies and storages, and text of a
      tracer
    - ``compressed_tracers``: tracers of sparse values
The path of a call to its rule
    - ``batch_handlers``: the handlers of batched tensors
    - ``call_plans``: what is decided once for a kind of call
    - ``plan_conditions``: what a plan checks at each call before it leaves the call to torch
    - ``tracer_members``: methods and operators with which compiled handlers replace torch's
    - ``parsing``: the operator and arguments of a Python call
    - ``recipes``: the operators that a rule called
    - ``function_registry``: rules of Python functions, and their order
    - ``operators``: torch's operators as rows of the table
    - ``decompositions``: operators without a rule
    - ``schemas``: the schemas of operators, for the catalogue
    - ``registrations``: all that is registered with torch
    - ``mode_handlers``: torch's own modes
    - ``modes_below``: the user's dispatch modes, below all levels
    - ``python_functions``: the path of torch's Python functions to the handlers
Errors and questions of the user's code
    - ``boundaries``: where a transform begins
    - ``checks``: tests that raise for one outcome
    - ``user_queries``: reads of sizes, which become guards of a trace, and the lines of calls
    - ``interrupts``: the thread's state after an interrupt
torch's state
    - ``torch_state``: the thread's state that a level captures
    - ``torch_settings``: the settings that a program depends on
    - ``functorch``, ``dynamo``, ``dtensors``, ``torch_pytrees``: torch.func, torch.compile,
      DTensors, torch's pytrees
Random numbers
    - ``draw_keys``: keys and counts of draws by example
    - ``generators``, ``random_states``: the states of torch's generators
Code that runs again
    - ``backward``: ``backward()`` inside a transform
    - ``reentry``: levels that have ended
    - ``replay``: objects that a checkpoint's function made
    - ``replaced_state``: the tensors that a functional call gives to a module
Tensors that a function reaches
    - ``reachable``: those that lie in objects
    - ``own_state``, ``optimizer_state``: those of modules and of optimizers
    - ``memory_meter``: the memory of a block
"""
