import WitCert.Algebra.Field
import WitCert.Algebra.Ring
import WitCert.Algebra.Order
import WitCert.Algebra.Sum
import WitCert.Attention.Cell
import WitCert.Attention.Forms
import WitCert.Attention.Subset
import WitCert.Attention.Jensen
