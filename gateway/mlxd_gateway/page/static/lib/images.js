// Images of a conversation: read from files as data URLs, within the server's own bounds.

/** The types that the server reads. */
export const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
/** Of a conversation: every message is sent again with the next one. */
export const IMAGES_MAX = 16;
export const IMAGE_BYTES_MAX = 8 * 2 ** 20;
export const IMAGES_BYTES_MAX = 10 * 2 ** 20;

/**
 * @typedef {object} Picture
 * @property {string} name of its file
 * @property {number} size in bytes
 * @property {string} url a data URL
 */

/**
 * @param {{name: string, size: number, type: string}[]} files to be added
 * @param {{size: number}[]} shown in the conversation so far, and with the next message
 * @returns {string} why not all of them can be; empty: they can
 */
export function problemOf(files, shown) {
  const other = files.find(({ type }) => !TYPES.includes(type));
  if (other) {
    return `${other.name} is no PNG, JPEG, WebP or GIF.`;
  }
  const empty = files.find(({ size }) => size === 0);
  if (empty) {
    return `${empty.name} is empty.`;
  }
  const large = files.find(({ size }) => size > IMAGE_BYTES_MAX);
  if (large) {
    return `${large.name} is larger than ${IMAGE_BYTES_MAX / 2 ** 20} MiB.`;
  }
  if (shown.length + files.length > IMAGES_MAX) {
    return `A conversation shows at most ${IMAGES_MAX} images.`;
  }
  const all = [...shown, ...files].reduce((sofar, { size }) => sofar + size, 0);
  if (all > IMAGES_BYTES_MAX) {
    return `The images of a conversation have at most ${IMAGES_BYTES_MAX / 2 ** 20} MiB.`;
  }
  return "";
}

/**
 * @param {File} file
 * @returns {Promise<Picture>}
 * @throws {Error} it cannot be read
 */
export function readPicture(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () =>
      resolve({ name: file.name, size: file.size, url: /** @type {string} */ (reader.result) });
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/**
 * @param {DataTransfer | null} transfer what is pasted or dropped
 * @returns {File[]} the files in it, whatever they are; none where it is a text, or has one too
 */
export function filesOf(transfer) {
  const isText = [...(transfer?.types ?? [])].includes("text/plain");
  return isText ? [] : [...(transfer?.files ?? [])];
}

/**
 * @param {string} text
 * @param {Picture[]} pictures
 * @returns {string | object[]} the content of a message of OpenAI's API
 */
export function contentOf(text, pictures) {
  if (pictures.length === 0) {
    return text;
  }
  const shown = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...shown, { type: "text", text }] : shown;
}
