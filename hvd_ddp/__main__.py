import sys

from hvd_ddp.main import main

sys.exit(main())
