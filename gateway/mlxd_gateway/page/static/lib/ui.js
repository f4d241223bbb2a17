// The one place that names the view library: components import it from here.

export {
  html, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState,
} from "../vendor/htm-preact.js";
