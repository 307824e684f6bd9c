from .blocks import ShardedCSR as ShardedCSR
from .layout import hidden_layout as hidden_layout
from .layout import make_mesh as make_mesh
from .processes import OtherProcessError as OtherProcessError
from .processes import join_processes as join_processes
