prelude
import Core.Arithmetic
